// SPDX-License-Identifier: Apache-2.0
//
// The one symbol that lets Python import a library of ours. A file of its own, so that none of the others needs
// Python's headers.

#include "python_module_stub.h"

FSMOE_PYTHON_MODULE_STUB()
