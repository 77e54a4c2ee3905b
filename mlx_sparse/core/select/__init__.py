"""Select the keys with the largest scores (`top_k_select`). Ties go to the lower index."""
