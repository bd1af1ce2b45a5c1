"""Rollouts: prompts -> what a model writes behind them, as token ids in a folder.

    prompts + subject -> {generate, server} -> folder -> qaudit.text.rollouts, which reads it

They are written once, by full precision, and every stream of a scan is scored on them.
"""
