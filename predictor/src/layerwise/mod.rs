//! Prediction per layer and token of the experts of a later layer, while a request runs.
//!
//! [`GateLookahead`] applies a copy of layer l + d's gate to the input of layer l (`MoEless`) and fine-tunes it if it
//! is not accurate enough. [`Affinity`] predicts from the experts of an earlier layer (DuoServe-MoE) and needs no
//! hidden states. Both return the experts of each token, [tokens, top_k], ascending within a token. [`HitRates`]
//! measures their accuracy.

mod affinity;
mod gate;
mod hit_rates;

pub use affinity::{Affinity, TokenRoutes};
pub use gate::{FineTuning, GateLookahead};
pub use hit_rates::HitRates;
