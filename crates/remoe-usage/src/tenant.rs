//! Tenant ids in the training history.

/// Tenant, identified by a hash of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tenant(pub(crate) u64);

impl Tenant {
    /// Returns the tenant called `name`. All requests without a tenant name share one tenant.
    #[must_use]
    pub fn named(name: &str) -> Self {
        // FNV-1a gives the same hash in every process, as stored files require.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
    }
}
