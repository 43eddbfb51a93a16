"""Not the documents': MAML as TorchOpt's tutorials write it, with every optimizer inside and outside."""

import completion
import torch
import torchopt

POSITIONAL = {
    "SGD": (0.05, 0.9, 0.01, 0.1, False),
    "Adam": (0.05, (0.8, 0.99), 1e-6, 0.01),
    "AdamW": (0.05, (0.8, 0.99), 1e-6, 0.1),
    "AdaDelta": (1.0, 0.8, 1e-4, 0.01),
    "AdaGrad": (0.05, 0.1, 0.01, 0.2, 1e-8),
    "AdaMax": (0.05, (0.8, 0.99), 1e-6, 0.01),
    "RAdam": (0.05, (0.8, 0.99), 1e-6, 0.01),
    "RMSProp": (0.05, 0.9, 1e-6, 0.01, 0.5, True),
}


def train(net, inner_opt, outer_opt, args):
    """TorchOpt's loop: the net and the inner optimizer go back to where they were after each task."""
    for epoch in range(args.epochs):
        net_state = torchopt.extract_state_dict(net, by="reference", detach_buffers=True)
        optim_state = torchopt.extract_state_dict(inner_opt, by="reference")
        outer_loss = torch.zeros(())
        for task in completion.data(2, 6, seed=epoch):
            for _ in range(args.inner_steps):
                inner_opt.step(completion.loss_of(net, task))
            outer_loss = outer_loss + completion.loss_of(net, task) / 2
            torchopt.recover_state_dict(net, net_state)
            torchopt.recover_state_dict(inner_opt, optim_state)
        outer_opt.zero_grad()
        outer_loss.backward()
        outer_opt.step()
        torchopt.stop_gradient(net)
        torchopt.stop_gradient(inner_opt)
    return outer_loss


def chained():
    """Gradients cut in length, without NaN, with decay, by a rate that falls."""
    return torchopt.combine.chain(
        torchopt.clip.clip_grad_norm(0.5),
        torchopt.hook.register_hook(torchopt.hook.zero_nan_hook),
        torchopt.transform.add_decayed_weights(0.01),
        torchopt.sgd(torchopt.schedule.linear_schedule(0.2, 0.02, 4), 0.9),
    )


def functional(args):
    """The same chain as a functional optimizer, as a class, and by hand."""
    net = completion.build_model()
    params = [p.detach().clone().requires_grad_() for p in net.parameters()]
    by_hand = torchopt.pytree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
    impl = chained()
    state = impl.init(by_hand)
    func_opt, class_opt = torchopt.FuncOptimizer(chained()), torchopt.Optimizer(net.parameters(), chained())
    samples = completion.data(6)

    def loss_at(values):
        with torchopt.nn.reparametrize(net, dict(zip(dict(net.named_parameters()), values))):
            return completion.loss_of(net, samples)

    for _ in range(3):
        params = func_opt.step(loss_at(params), params)
        grads = torch.autograd.grad(loss_at(by_hand), by_hand)
        updates, state = impl.update(list(grads), state, params=by_hand, inplace=False)
        by_hand = torchopt.apply_updates(by_hand, updates, inplace=False)
        class_opt.zero_grad()
        completion.loss_of(net, samples).backward()
        class_opt.step()
    for one, other, third in zip(params, by_hand, net.parameters()):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)
    completion.save(args, "maml_every_optimizer-functional", loss=loss_at(params), parameters=list(params))


def main(args):
    cases = {
        name: (getattr(torchopt, f"Meta{name}"), getattr(torchopt, name), given)
        for name, given in POSITIONAL.items()
    }
    for name, (inner, outer, given) in cases.items():
        net = completion.build_model()
        loss = train(net, inner(net, *given), outer(net.parameters(), *given), args)
        completion.save(args, f"maml_every_optimizer-{name}", loss=loss, parameters=list(net.parameters()))
    net = completion.build_model()
    outer = torchopt.Adam(net.parameters(), lr=0.05)
    loss = train(net, torchopt.MetaOptimizer(net, chained()), outer, args)
    completion.save(args, "maml_every_optimizer-chained", loss=loss, parameters=list(net.parameters()))
    functional(args)


if __name__ == "__main__":
    main(completion.parse_arguments())
