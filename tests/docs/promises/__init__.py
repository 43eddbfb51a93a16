"""The summary lines of ``docs/api``, each as a program of a few lines."""
