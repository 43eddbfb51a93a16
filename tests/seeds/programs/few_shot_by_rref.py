"""Not the documents': MAML on digits, with the network sent by reference, and tasks split or loaded on the workers."""

import completion
import digits
import torch
import torch.nn.functional as F
import torchopt

import torchopt.distributed as todist

TASKS = 6


def inner_loop(net_rref, x_spt, y_spt, x_qry, y_qry, lr, inner_steps):
    """On a worker: adapt to one task, and return the loss and the accuracy on its queries."""
    net = torchopt.module_clone(net_rref.to_here(), by="reference", detach_buffers=True)
    inner_opt = torchopt.MetaSGD(net, lr=lr)
    for _ in range(inner_steps):
        inner_opt.step(F.cross_entropy(net(x_spt), y_spt))
    logits = net(x_qry)
    return F.cross_entropy(logits, y_qry), (logits.argmax(dim=1) == y_qry).double().mean()


def mean_of_both(results):
    losses, accuracies = zip(*results)
    return torch.stack(losses).mean(), torch.stack(accuracies).mean()


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=True), reducer=mean_of_both
)
def inner_loop_of_split_tasks(net_rref, x_spt, y_spt, x_qry, y_qry, lr, inner_steps):
    parts = [part.squeeze(0) for part in (x_spt, y_spt, x_qry, y_qry)]
    return inner_loop(net_rref, *parts, lr, inner_steps)


def one_part_each(net_rref, numbers, lr, inner_steps):
    """A partitioner: to each worker the numbers of the tasks that it is to load."""
    workers = todist.get_world_size()
    return [(rank, (net_rref, numbers[rank::workers], lr, inner_steps), None) for rank in range(workers)]


@todist.parallelize(partitioner=one_part_each, reducer=mean_of_both)
def inner_loop_of_loaded_tasks(net_rref, numbers, lr, inner_steps):
    results = [inner_loop(net_rref, *digits.task(number), lr, inner_steps) for number in numbers]
    return mean_of_both(results)


def split(net_rref, numbers, *settings):
    return inner_loop_of_split_tasks(net_rref, *digits.batch(numbers), *settings)


@todist.rank_zero_only
def train(args):
    for name, loss_of_tasks in (("split", split), ("loaded", inner_loop_of_loaded_tasks)):
        net = digits.build_net()
        meta_opt = torch.optim.Adam(net.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            numbers = [epoch * TASKS + task for task in range(TASKS)]
            with todist.autograd.context() as context_id:
                net_rref = todist.rpc.RRef(torchopt.module_clone(net, by="copy"))
                loss, accuracy = loss_of_tasks(net_rref, numbers, args.lr, args.inner_steps)
                meta_opt.zero_grad()
                todist.autograd.backward(context_id, loss)
            meta_opt.step()
        completion.save(
            args, f"few_shot_by_rref-{name}", loss=loss, accuracy=accuracy, parameters=list(net.parameters())
        )


@todist.auto_init_rpc(worker_init_fn=completion.use_cpu_where_there_is_no_gpu)
def main(args):
    train(args)


if __name__ == "__main__":
    main(completion.parse_arguments())
