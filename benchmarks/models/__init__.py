# SPDX-License-Identifier: Apache-2.0
"""What is measured: layers and models, for stock DeepSpeed and for every schedule."""
