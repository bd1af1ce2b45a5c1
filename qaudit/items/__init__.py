"""Tasks: names -> items whose options are scored, each as tokens behind a context.

    harness <- files <- {tokens, prepare}

`lm-eval` (the extra `tasks`) knows the tasks and writes their prompts, and `harness` alone imports
it. Data come from the Hub by qaudit's own client, or from folders on this machine. `answered` reads
files of answers that lm-eval and inspect wrote.
"""
