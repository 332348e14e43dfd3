//! The feed-forward part of one layer: dense, or routed experts beside shared ones.

use super::{ForwardError, LayerRouting};
use crate::backend::{Backend, ResidentPart, Router};
use crate::dispatch::{Experts, LayerCall};
use crate::routing::Routed;

/// Either kind of feed-forward part.
pub(super) enum Mlp<B: Backend> {
    Dense(B::Gated),
    Moe(Box<Moe<B>>),
}

/// Router of the experts, and the experts that every token passes.
pub(super) struct Moe<B: Backend> {
    pub(super) router: Router<B>,
    pub(super) hidden: usize,
    pub(super) besides: SharedContribution<B>,
}

/// Contribution to every token beside that of its routed experts.
pub(super) enum SharedContribution<B: Backend> {
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
                    SharedContribution::Nothing => 0,
                    SharedContribution::Shared(shared) => {
                        shared.network.bytes() + shared.gate.as_ref().map_or(0, ResidentPart::bytes)
                    }
                    SharedContribution::Bias(row) => row.len(),
                };
                moe.router.bytes() + besides
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
    /// Returns what shared experts add to every row of `x`, where that stays on the device.
    pub(super) fn shared_on_device(&self, ops: &B, x: &B::Tensor) -> Result<Option<B::Tensor>, ForwardError> {
        match &self.besides {
            SharedContribution::Shared(network) if B::ADDS_SHARED => Ok(Some(network.forward(ops, x)?)),
            SharedContribution::Shared(_) | SharedContribution::Nothing | SharedContribution::Bias(_) => {
                Ok(None)
            }
        }
    }

    /// Does `then` with what every row of `x` gets beside its routed experts on the host: rows x hidden.
    pub(super) fn with_besides<T>(
        &self,
        ops: &B,
        x: &B::Tensor,
        rows: usize,
        then: impl FnOnce(Option<&[u8]>) -> T,
    ) -> Result<T, ForwardError> {
        Ok(match &self.besides {
            SharedContribution::Shared(network) if !B::ADDS_SHARED => {
                then(Some(&ops.bytes(&network.forward(ops, x)?)?))
            }
            SharedContribution::Shared(_) | SharedContribution::Nothing => then(None),
            SharedContribution::Bias(row) => then(Some(&row.repeat(rows))),
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
        let (inputs, routed) = ops.route(&self.router, x)?;
        if let Some(routing) = routing {
            routing.push(recorded(layer, &routed));
        }
        let call = LayerCall { layer, inputs: &inputs, routed: &routed };
        // Messages leave, and remote functions work while shared and local experts are computed.
        let outstanding = experts.send_off(&call);
        // On a device this is begun here, and local experts do not wait for it.
        let shared = self.shared_on_device(ops, x)?;
        let output: B::Tensor = self.with_besides(ops, x, routed.tokens(), |besides| {
            ops.filled(routed.tokens(), self.hidden, |output| {
                experts.finish(&call, outstanding, besides, output).map_err(ForwardError::from)
            })
        })??;
        match shared {
            None => Ok(output),
            Some(shared) => Ok(ops.add(output, &shared)?),
        }
    }
}

pub(super) fn recorded(layer: usize, routed: &Routed) -> LayerRouting {
    LayerRouting { layer, tokens: (0..routed.tokens()).map(|token| routed.of(token).collect()).collect() }
}
