// SPDX-License-Identifier: Apache-2.0
// Everything public. The usage example is at the top of engine.h; attention without a model is in
// attention.h.
#pragma once

#include "lodestone/attention.h"
#include "lodestone/automatic.h"
#include "lodestone/chat.h"
#include "lodestone/document.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "lodestone/kv_view.h"
#include "lodestone/register_method.h"
#include "lodestone/scheduler.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"
#include "lodestone/tokenizer.h"
#include "lodestone/types.h"
