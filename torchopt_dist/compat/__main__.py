"""``python -m torchopt_dist.compat SCRIPT [ARGUMENT…]`` → the script, run with torchopt_dist in TorchOpt's place."""

from torchopt_dist import compat

if __name__ == "__main__":
    compat.main()
