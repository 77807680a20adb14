# SPDX-License-Identifier: Apache-2.0
"""How a rank's experts are computed: by hand or by autograd, one by one or grouped."""
