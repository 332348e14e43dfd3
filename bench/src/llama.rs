//! llama.cpp's own benchmark, run between our measurements.

use crate::error::{BenchError, ErrorContext, Result};
use crate::machine::cores;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A `llama-bench` program and models for it.
#[derive(Debug, Clone)]
pub(crate) struct LlamaBench {
    pub(crate) program: PathBuf,
    pub(crate) models: Vec<PathBuf>,
}

/// Tokens per second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Speed {
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
}

impl LlamaBench {
    /// One pass of `model` with `prompt` tokens and one with `generated`.
    pub(crate) fn run(&self, model: &Path, prompt: usize, generated: usize) -> Result<Speed> {
        let running = || format!("running {}", self.program.display());
        let mut command = Command::new(&self.program);
        command.arg("-m").arg(model).args(["-o", "json", "-r", "1", "-ngl", "0"]);
        for (flag, value) in [("-p", prompt), ("-n", generated), ("-t", cores())] {
            command.arg(flag).arg(value.to_string());
        }
        let output = command.output().doing(running)?;
        if !output.status.success() {
            return Err(BenchError::new(running(), String::from_utf8_lossy(&output.stderr)));
        }
        let tests: Vec<Value> = serde_json::from_slice(&output.stdout).doing(running)?;
        let speed = |prompt: usize, generated: usize| {
            let test = tests
                .iter()
                .find(|test| test["n_prompt"] == prompt as u64 && test["n_gen"] == generated as u64);
            test.and_then(|test| test["avg_ts"].as_f64()).doing(running)
        };
        Ok(Speed { prefill: speed(prompt, 0)?, decode: speed(0, generated)? })
    }
}
