//! Tenants, as stores name them.

/// A tenant, by a number that its name gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tenant(pub(crate) u64);

impl Tenant {
    /// The tenant called `name`; those without a name are one.
    #[must_use]
    pub fn named(name: &str) -> Self {
        // FNV-1a: the same in every process, so that stores are understood.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, step))
    }
}
