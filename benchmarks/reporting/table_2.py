# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 2, as printed: what single operations of a layer take on its testbeds, B = 4 and L = 1024."""

from __future__ import annotations

COLUMNS = ("a2a", "all_reduce", "all_gather", "reduce_scatter", "experts", "routing", "order", "attention")
TABLE_2 = {
    ("a", "gpt", "forward"): (6.9, 0, 4.6, 5.4, 3.1, 0.1, 0.3, 1.7),
    ("a", "gpt", "backward"): (6.9, 5.26, 4.6, 5.4, 6.1, 0.1, 0.4, 3.6),
    ("a", "mixtral", "forward"): (19.5, 0, 12.3, 13.7, 15.6, 0.1, 0.3, 4.1),
    ("a", "mixtral", "backward"): (19.6, 26.45, 12.3, 13.7, 31.8, 0.1, 0.5, 7.7),
    ("b", "gpt", "forward"): (11.2, 0, 15.5, 15.7, 6.7, 0.1, 0.3, 4.5),
    ("b", "gpt", "backward"): (11.2, 7.3, 15.5, 15.2, 13, 0.1, 0.3, 8.6),
    ("b", "mixtral", "forward"): (28.3, 0, 39.6, 40.8, 58.5, 0.1, 0.7, 9.5),
    ("b", "mixtral", "backward"): (30.8, 32.1, 40.1, 41.8, 119.7, 0.2, 1.2, 18.1),
}
"""(testbed, kind of experts, phase) -> milliseconds, in the order of the columns."""
SAMPLES, LENGTH = 4, 1024
COPIES = {"a": 2.0, "b": 2.4}
"""How often a token is sent, k * f, which the paper does not state: what fits best."""
