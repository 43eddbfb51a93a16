"""Not the documents': MAML over workers by each kind of call, partitioner, reducer and gradient that TorchOpt has."""

import completion
import torch
import torchopt

import torchopt.distributed as todist


def adapted_loss(model, task, lr, inner_steps):
    """On a worker: the loss after some steps on the task."""
    inner_model = torchopt.module_clone(model, by="reference", detach_buffers=True)
    inner_opt = torchopt.MetaSGD(inner_model, lr, 0.9)
    for _ in range(inner_steps):
        inner_opt.step(completion.loss_of(inner_model, task))
    return completion.loss_of(inner_model, task)


one_task_each = todist.dim_partitioner(0, exclusive=True, keepdim=False)
by_object = todist.TensorDimensionPartitioner(0, exclusive=True, keepdim=False)
mean_sync = todist.parallelize(one_task_each, todist.mean_reducer)(adapted_loss)
sum_async = todist.parallelize_async(by_object, todist.sum_reducer)(adapted_loss)
all_sync = todist.parallelize_sync(one_task_each)(adapted_loss)
counts = {"zero": 0, "others": 0}


@todist.rank_zero_only
def count_zero():
    counts["zero"] += 1


@todist.not_on_rank(0)
def count_others():
    counts["others"] += 1


def where(_):
    return todist.get_rank()


@todist.on_rank(0)
def train(args):
    tasks = completion.data(5, 6)
    given = {"args": (args.lr, args.inner_steps)}

    def by_mean(model):
        return mean_sync(model, tasks, *given["args"])

    def by_future(model):
        return sum_async(model, tasks, *given["args"]).wait() / len(tasks)

    def by_list(model):
        return torch.stack(all_sync(model, tasks, *given["args"])).mean()

    def by_remote_call(model):
        arguments = (model, tasks, *given["args"])
        future = todist.remote_async_call(
            adapted_loss, args=arguments, partitioner=one_task_each, reducer=todist.mean_reducer
        )
        return torchopt.pytree.tree_wait({"loss": future})["loss"]

    for loss_of_tasks in (by_mean, by_future, by_list, by_remote_call):
        model = completion.build_model()
        optimizer = torchopt.Adam(model.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            optimizer.zero_grad()
            if epoch == 0:
                with todist.autograd.context() as context_id:
                    loss = loss_of_tasks(todist.module_clone(model, by="clone"))
                    todist.autograd.backward(context_id, loss)
            else:
                loss = loss_of_tasks(model)
                loss.backward()
            optimizer.step()
        name = f"maml_distributed-{loss_of_tasks.__name__}"
        completion.save(args, name, loss=loss, parameters=list(model.parameters()))
    ranks = todist.remote_sync_call(
        where, args=(torch.arange(todist.get_world_size()),), partitioner=one_task_each
    )
    completion.save(args, "maml_distributed-ranks", ranks=sorted(ranks))


@todist.auto_init_rpc(worker_init_fn=completion.use_cpu_where_there_is_no_gpu)
def main(args):
    count_zero()
    count_others()
    train(args)
    todist.barrier()
    completion.save(args, "maml_distributed-counts", counts=[counts["zero"], counts["others"]])


if __name__ == "__main__":
    main(completion.parse_arguments())
