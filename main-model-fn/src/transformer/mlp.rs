//! Feed-forward part of one layer: a dense MLP, or routed and shared experts.

use super::{ForwardError, LayerRouting};
use crate::backend::{Backend, ResidentPart, Router};
use crate::dispatch::{ExpertDispatcher, LayerCall};
use crate::routing::Routed;

/// Feed-forward part of one layer.
pub(super) enum Mlp<B: Backend> {
    Dense(B::GatedMlp),
    Moe(Box<Moe<B>>),
}

/// Router of a layer's routed experts, and the contribution that every token gets.
pub(super) struct Moe<B: Backend> {
    pub(super) router: Router<B>,
    pub(super) hidden: usize,
    pub(super) shared: SharedContribution<B>,
}

/// Contribution to every token in addition to its routed experts.
pub(super) enum SharedContribution<B: Backend> {
    Nothing,
    Experts(SharedExperts<B>),
    /// One row that is added to every token: compute dtype, little endian.
    Bias(Vec<u8>),
}

/// Shared experts, with the gate that some families have.
pub(super) struct SharedExperts<B: Backend> {
    pub(super) network: B::GatedMlp,
    pub(super) gate: Option<B::Linear>,
}

impl<B: Backend> Mlp<B> {
    /// Returns the bytes of the weights, without routed experts.
    pub(super) fn weight_bytes(&self) -> usize {
        match self {
            Self::Dense(network) => network.bytes(),
            Self::Moe(moe) => {
                let shared = match &moe.shared {
                    SharedContribution::Nothing => 0,
                    SharedContribution::Experts(shared) => {
                        shared.network.bytes() + shared.gate.as_ref().map_or(0, ResidentPart::bytes)
                    }
                    SharedContribution::Bias(row) => row.len(),
                };
                moe.router.bytes() + shared
            }
        }
    }
}

impl<B: Backend> SharedExperts<B> {
    fn forward(&self, ops: &B, x: &B::Tensor) -> Result<B::Tensor, ForwardError> {
        let output = ops.gated(&self.network, x)?;
        match &self.gate {
            None => Ok(output),
            Some(gate) => Ok(ops.scale_by_sigmoid(output, &ops.linear(gate, x)?)?),
        }
    }
}

impl<B: Backend> Moe<B> {
    /// Computes the shared experts' output for the rows `x`, if it stays on the device.
    pub(super) fn shared_on_device(&self, ops: &B, x: &B::Tensor) -> Result<Option<B::Tensor>, ForwardError> {
        match &self.shared {
            SharedContribution::Experts(experts) if B::ADDS_SHARED => Ok(Some(experts.forward(ops, x)?)),
            SharedContribution::Experts(_) | SharedContribution::Nothing | SharedContribution::Bias(_) => {
                Ok(None)
            }
        }
    }

    /// Calls `then` with the shared contribution to the rows `x` on the host: rows x hidden.
    pub(super) fn with_shared_on_host<T>(
        &self,
        ops: &B,
        x: &B::Tensor,
        rows: usize,
        then: impl FnOnce(Option<&[u8]>) -> T,
    ) -> Result<T, ForwardError> {
        Ok(match &self.shared {
            SharedContribution::Experts(experts) if !B::ADDS_SHARED => {
                then(Some(&ops.host_bytes(&experts.forward(ops, x)?)?))
            }
            SharedContribution::Experts(_) | SharedContribution::Nothing => then(None),
            SharedContribution::Bias(row) => then(Some(&row.repeat(rows))),
        })
    }

    /// Computes the layer's experts for `x`: rows x hidden. Appends each row's experts to `routing`, if it is traced.
    pub(super) fn forward(
        &self,
        layer: usize,
        ops: &B,
        x: &B::Tensor,
        experts: &mut ExpertDispatcher,
        routing: Option<&mut Vec<LayerRouting>>,
    ) -> Result<B::Tensor, ForwardError> {
        let (inputs, routed) = ops.route(&self.router, x)?;
        if let Some(routing) = routing {
            routing.push(layer_routing(layer, &routed));
        }
        let call = LayerCall { layer, inputs: &inputs, routed: &routed };
        // Messages leave first: remote functions work while shared and local experts are computed.
        let outstanding = experts.dispatch(&call);
        // A device only starts this here; local experts do not wait for it.
        let shared = self.shared_on_device(ops, x)?;
        let output: B::Tensor = self.with_shared_on_host(ops, x, routed.tokens(), |shared| {
            ops.tensor_from_host(routed.tokens(), self.hidden, |output| {
                experts.finish(&call, outstanding, shared, output).map_err(ForwardError::from)
            })
        })??;
        match shared {
            None => Ok(output),
            Some(shared) => Ok(ops.add(output, &shared)?),
        }
    }
}

/// Returns the routing of one layer for a trace.
pub(super) fn layer_routing(layer: usize, routed: &Routed) -> LayerRouting {
    let tokens = (0..routed.tokens()).map(|token| routed.token_experts(token).collect());
    LayerRouting { layer, tokens: tokens.collect() }
}
