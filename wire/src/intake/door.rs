//! Who is let in.

use super::peer::{Peer, Socket};
use crate::identity::{Ends, HANDSHAKE_LIMIT, Line, Trust};
use std::sync::Arc;
use tokio::time::timeout;

/// Why a connection was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It showed no certificate that is believed, or spoke something else.
    Handshake,
    /// It did not finish the handshake in time.
    Timeout,
    /// It is somebody else: its requests are answered with PERMISSION_DENIED.
    Identity,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Handshake, Self::Timeout, Self::Identity];

    /// For metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Timeout => "timeout",
            Self::Identity => "identity",
        }
    }
}

/// Lets in whom a [`Trust`] names.
#[derive(Clone)]
pub struct Door {
    trust: Trust,
    refused: Arc<dyn Fn(Refusal) + Send + Sync>,
}

impl Door {
    /// Lets in whom `trust` names; `refused` hears of everybody else.
    #[must_use]
    pub fn new(trust: Trust, refused: impl Fn(Refusal) + Send + Sync + 'static) -> Self {
        Self { trust, refused: Arc::new(refused) }
    }

    /// The handshake with `peer` over its `socket`; none where it comes to nothing.
    pub(super) async fn enter(self, socket: Socket, peer: &Peer) -> Option<Line<Socket>> {
        let (line, Ends { found, needed }) = match timeout(HANDSHAKE_LIMIT, self.trust.accept(socket)).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => {
                tracing::debug!(%error, "a connection is refused");
                (self.refused)(Refusal::Handshake);
                return None;
            }
            Err(_elapsed) => {
                (self.refused)(Refusal::Timeout);
                return None;
            }
        };
        let welcome = found == needed;
        peer.known(welcome);
        if !welcome {
            tracing::warn!(%found, %needed, "a connection is refused");
            (self.refused)(Refusal::Identity);
        }
        Some(line)
    }
}
