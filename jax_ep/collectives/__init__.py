"""all_reduce, all_gather, reduce_scatter and all_to_all between the ranks of a mesh axis."""
