"""Layouts put on devices, and what models are given to run on them.

Reading order:

    axes, holding                          groups of ranks; what a rank holds of a parameter
    collectives, context                   what models call, with gradients
    later, pipeline                        weight gradients for later, and the schedules that need them
    buckets, shard                         sums of gradients and divided weights
    launch, activations                    two folders: how ranks begin; what waits for backward
    kit                                    all of this as one value for every module
    copies, messages                       between host and device; between ranks beside training
"""
