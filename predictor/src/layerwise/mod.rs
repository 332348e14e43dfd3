//! Prediction per layer and per token, for functions that must know while a request runs which experts
//! a later layer will want.
//!
//! Two ways: [`GateLookahead`] applies a copy of layer l + d's gate to what enters layer l (`MoEless`),
//! fine-tuned where it is not accurate enough; [`Affinity`] knows which experts
//! follow which (DuoServe-MoE) and needs no hidden states. Both answer with the experts of each token,
//! [tokens, top_k], ascending within a token, and are measured by [`HitRates`].

mod affinity;
mod gate;
mod hits;

pub use affinity::{Affinity, TokenRoutes};
pub use gate::{FineTuning, GateLookahead};
pub use hits::HitRates;
