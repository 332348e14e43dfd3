//! The `main-model-fn-torch` program: LibTorch's operations.

use std::process::ExitCode;

fn main() -> ExitCode {
    main_model_fn::main::<main_model_torch::Torch>()
}
