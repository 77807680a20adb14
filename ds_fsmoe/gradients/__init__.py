# SPDX-License-Identifier: Apache-2.0
"""When gradients travel: DeepSpeed's reduction taken over, in slices beside the backward."""
