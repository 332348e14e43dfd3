//! The `main-model-fn` program: the native operations, no LibTorch.

use std::process::ExitCode;

fn main() -> ExitCode {
    main_model_fn::main::<main_model_fn::Native>()
}
