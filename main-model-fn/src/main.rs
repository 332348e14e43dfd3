//! The `main-model-fn` program, with the native backend.

use std::process::ExitCode;

fn main() -> ExitCode {
    main_model_fn::main::<main_model_fn::Native>()
}
