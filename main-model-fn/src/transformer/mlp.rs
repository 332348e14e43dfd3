//! The feed-forward part of one layer: dense, or routed experts beside shared ones.

use super::{ForwardError, LayerRouting};
use crate::backend::{Backend, Held};
use crate::dispatch::{Experts, LayerCall, Routed, route};
use remoe_kernels::Dtype;
use remoe_model::RoutingFacts;

/// Either kind of feed-forward part.
pub(super) enum Mlp<B: Backend> {
    Dense(B::Gated),
    Moe(Box<Moe<B>>),
}

/// Router of the experts, and the experts that every token passes.
pub(super) struct Moe<B: Backend> {
    pub(super) router: B::Linear,
    pub(super) routing: RoutingFacts,
    /// Correction that is added to each expert's score for the choice, if the model has one.
    pub(super) correction: Vec<f32>,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) hidden: usize,
    pub(super) dtype: Dtype,
    pub(super) besides: Besides<B>,
}

/// Contribution to every token beside that of its routed experts.
pub(super) enum Besides<B: Backend> {
    Nothing,
    Shared(SharedExperts<B>),
    /// One row, in the compute dtype, little endian.
    Bias(Vec<u8>),
}

/// Experts that every token passes, with the gate that some families put on them.
pub(super) struct SharedExperts<B: Backend> {
    pub(super) network: B::Gated,
    pub(super) gate: Option<B::Linear>,
}

impl<B: Backend> Mlp<B> {
    /// Bytes of its weights, without those of routed experts.
    pub(super) fn weight_bytes(&self) -> usize {
        match self {
            Self::Dense(network) => network.bytes(),
            Self::Moe(moe) => {
                let besides = match &moe.besides {
                    Besides::Nothing => 0,
                    Besides::Shared(shared) => {
                        shared.network.bytes() + shared.gate.as_ref().map_or(0, Held::bytes)
                    }
                    Besides::Bias(row) => row.len(),
                };
                moe.router.bytes() + size_of_val(&moe.correction[..]) + besides
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
    /// The experts of each row of `x`, rows x hidden.
    pub(super) fn route(&self, ops: &B, x: &B::Tensor) -> Result<Routed, ForwardError> {
        let logits = ops.floats(&ops.linear(&self.router, x)?)?;
        Ok(route(&logits, self.experts, self.top_k, &self.routing, &self.correction, self.dtype))
    }

    /// Does `then` with what every row of `x` gets beside its routed experts: rows x hidden on the host.
    pub(super) fn with_besides<T>(
        &self,
        ops: &B,
        x: &B::Tensor,
        rows: usize,
        then: impl FnOnce(Option<&[u8]>) -> T,
    ) -> Result<T, ForwardError> {
        Ok(match &self.besides {
            Besides::Nothing => then(None),
            Besides::Shared(network) => then(Some(&ops.bytes(&network.forward(ops, x)?)?)),
            Besides::Bias(row) => then(Some(&row.repeat(rows))),
        })
    }

    /// `x`: rows x hidden. Where each row went is added to `routing`, if it is recorded.
    pub(super) fn forward(
        &self,
        layer: usize,
        ops: &B,
        x: &B::Tensor,
        experts: &mut Experts,
        routing: Option<&mut Vec<LayerRouting>>,
    ) -> Result<B::Tensor, ForwardError> {
        let inputs = ops.bytes(x)?;
        let routed = self.route(ops, x)?;
        if let Some(routing) = routing {
            routing.push(recorded(layer, &routed));
        }
        let call = LayerCall { layer, inputs: &inputs, routed: &routed };
        // Messages leave, and remote functions work while shared and local experts are computed.
        let outstanding = experts.send_off(&call);
        self.with_besides(ops, x, routed.tokens(), |besides| {
            ops.filled(routed.tokens(), self.hidden, |output| {
                Ok(experts.finish(&call, outstanding, besides, output)?)
            })
        })?
    }
}

pub(super) fn recorded(layer: usize, routed: &Routed) -> LayerRouting {
    LayerRouting { layer, tokens: (0..routed.tokens()).map(|token| routed.of(token).collect()).collect() }
}
