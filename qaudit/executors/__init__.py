"""Executors run the passes of a plan and yield what comes of them.

An executor has one method, `execute(plan, passes)`, which yields events. `in_process` runs them one
after another in this process.
"""
