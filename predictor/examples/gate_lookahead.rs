//! Accuracy of gate lookahead on hidden states of a real model.
//!
//! ```console
//! python predictor/examples/hidden_states.py demo/model train.safetensors train.jsonl --prompts 280
//! python predictor/examples/hidden_states.py demo/model test.safetensors test-*.jsonl --prompts 140
//! cargo run --release -p predictor --example gate_lookahead -- train.safetensors test.safetensors
//! ```
//!
//! Gates are fine-tuned on the first file and measured on the second. Distance 0 is the layer's own gate, which must
//! be exact; otherwise the states are not the input of the gates.

#![allow(clippy::print_stdout)]

use remoe_predictor::GateWeights;
use remoe_predictor::layerwise::{FineTuning, GateLookahead};
use safetensors::tensor::{Dtype, SafeTensors};
use std::error::Error;

type Failure = Box<dyn Error>;

/// Hidden states, routes and router weights of each layer with experts.
struct Dump {
    hidden: usize,
    experts: usize,
    top_k: usize,
    epsilon: f32,
    /// Hidden states of each layer, [tokens, hidden].
    states: Vec<Vec<f32>>,
    /// Routes of each layer, [tokens, `top_k`].
    routes: Vec<Vec<u16>>,
    weights: Vec<GateWeights>,
}

impl Dump {
    fn read(path: &str) -> Result<Self, Failure> {
        let bytes = std::fs::read(path)?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
        let epsilon = metadata.metadata().as_ref().and_then(|texts| texts.get("epsilon"));
        let epsilon = epsilon.ok_or("no `epsilon` in the metadata")?.parse()?;
        let file = SafeTensors::deserialize(&bytes)?;
        let (states, shape) = floats(&file, "states")?;
        let hidden = *shape.last().ok_or("`states` is no matrix")?;
        let (norms, _) = floats(&file, "norms")?;
        let (gates, shape) = floats(&file, "gates")?;
        let experts = *shape.get(1).ok_or("`gates` is not [layers, experts, hidden]")?;
        let routes = file.tensor("experts")?;
        if routes.dtype() != Dtype::U16 {
            return Err("`experts` is not uint16".into());
        }
        let top_k = *routes.shape().last().ok_or("`experts` is no matrix")?;
        let routes: Vec<Vec<u16>> = routes
            .data()
            .chunks_exact((routes.data().len() / norms.len()).max(1))
            .map(|layer| layer.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)).collect())
            .collect();
        let weights = norms.into_iter().zip(gates).map(|(norm, gate)| GateWeights { norm, gate }).collect();
        Ok(Self { hidden, experts, top_k, epsilon, states, routes, weights })
    }
}

/// Returns the layers of a tensor and its shape.
fn floats(file: &SafeTensors<'_>, name: &str) -> Result<(Vec<Vec<f32>>, Vec<usize>), Failure> {
    let tensor = file.tensor(name)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(format!("`{name}` is not float32").into());
    }
    let values: Vec<f32> =
        tensor.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let layers = tensor.shape().first().copied().filter(|layers| *layers > 0);
    let each = (values.len() / layers.ok_or(format!("`{name}` has no layer"))?).max(1);
    Ok((values.chunks_exact(each).map(<[f32]>::to_vec).collect(), tensor.shape().to_vec()))
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [train, test] = &arguments[..] else {
        return Err("name two files of hidden_states.py: train.safetensors test.safetensors".into());
    };
    let (train, test) = (Dump::read(train)?, Dump::read(test)?);
    let layers = test.weights.len();
    println!("distance  layer  as it is: mean  all    any    fine-tuned: mean  all    any");
    for distance in 0..layers.min(4) {
        for layer in 0..layers - distance {
            let later = layer + distance;
            let weights = test.weights[later].clone();
            let mut gate = GateLookahead::new(weights, test.hidden, test.experts, test.top_k, test.epsilon)?;
            let before = gate.measure(&test.states[layer], &test.routes[later])?;
            let tuned = gate.fine_tune(&train.states[layer], &train.routes[later], FineTuning::default())?;
            let after = gate.measure(&test.states[layer], &test.routes[later])?;
            let after = if tuned {
                format!("{:>16.3}  {:.3}  {:.3}", after.mean, after.all, after.any)
            } else {
                format!("{:>16}", "as it is")
            };
            println!(
                "{distance:>8}  {later:>5}  {:>14.3}  {:.3}  {:.3}  {after}",
                before.mean, before.all, before.any
            );
        }
    }
    Ok(())
}
