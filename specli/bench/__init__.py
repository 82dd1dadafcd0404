"""``specli bench``: what speculation does to these models, these prompts, this machine.

    workloads    built-in prompts, and prompts from a file
    harness      which runs, in which order, how long; over an abstract "decode this prompt with this setting"
    runner       that function over a loaded session
    statistics   medians and bootstrap intervals of numbers; pure
    report       runs -> one cell per workload and setting, costs, and what they mean in words
    document     the saved file: a report with its circumstances; comparing two of them
    plot         a picture (matplotlib)
"""
