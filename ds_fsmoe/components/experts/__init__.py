# SPDX-License-Identifier: Apache-2.0
"""The experts that the package has, one per file. A config or a model names them; see ``ds_fsmoe.registry``."""
