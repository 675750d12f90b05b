//! The operators `+`, `-`, `*`, `/` and negation of variables: `&a * &b + 1.0`.

use crate::tape::Var;

shardgrad_tensor::impl_operators!(Var);
