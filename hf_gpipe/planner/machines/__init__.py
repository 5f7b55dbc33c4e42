"""The devices, processes and links that a plan is for, as data: from data sheets, from options, or measured links.

`processes.Processes` has what each process may use, and `network.Network` the seconds of messages between the workers
of a placement. The package knows neither models nor plans.
"""
