//! Classes of addresses, after the IANA special-purpose registries (RFC 6890), and cloud metadata services.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Class of an address, as far as egress rules tell addresses apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Reachable over the internet.
    Public,
    /// Loopback, private and shared networks: machines, pods and Services.
    Private,
    /// Reserved or documentation.
    Reserved,
    /// Link-local, or the metadata service of a cloud, which hands out credentials of the machine.
    Metadata,
    /// Unspecified, multicast or broadcast. Linux connects to itself for the unspecified address.
    Unusable,
}

impl Class {
    /// Returns the name of the class in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Private => "loopback or private",
            Self::Reserved => "reserved",
            Self::Metadata => "link-local or a metadata service",
            Self::Unusable => "unspecified, multicast or broadcast",
        }
    }
}

const fn v4(octets: [u8; 4], length: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]), length)
}

const fn v6(segments: [u16; 8], length: u8) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), length)
}

/// Blocks of IPv4 that are not public. The first one that contains an address decides.
pub(super) const V4: [(Ipv4Net, Class); 18] = [
    (v4([0, 0, 0, 0], 8), Class::Unusable),
    (v4([255, 255, 255, 255], 32), Class::Unusable),
    (v4([224, 0, 0, 0], 4), Class::Unusable),
    (v4([169, 254, 0, 0], 16), Class::Metadata),
    // Of Alibaba Cloud and of Azure.
    (v4([100, 100, 100, 200], 32), Class::Metadata),
    (v4([168, 63, 129, 16], 32), Class::Metadata),
    (v4([127, 0, 0, 0], 8), Class::Private),
    (v4([10, 0, 0, 0], 8), Class::Private),
    (v4([172, 16, 0, 0], 12), Class::Private),
    (v4([192, 168, 0, 0], 16), Class::Private),
    (v4([100, 64, 0, 0], 10), Class::Private),
    (v4([192, 0, 0, 0], 24), Class::Reserved),
    (v4([192, 0, 2, 0], 24), Class::Reserved),
    (v4([192, 88, 99, 0], 24), Class::Reserved),
    (v4([198, 18, 0, 0], 15), Class::Reserved),
    (v4([198, 51, 100, 0], 24), Class::Reserved),
    (v4([203, 0, 113, 0], 24), Class::Reserved),
    (v4([240, 0, 0, 0], 4), Class::Reserved),
];

/// Blocks of IPv6 that are not public, but for what is outside of [`GLOBAL`].
pub(super) const V6: [(Ipv6Net, Class); 11] = [
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), Class::Unusable),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Class::Unusable),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), Class::Metadata),
    // Of Amazon and of Google.
    (v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32), Class::Metadata),
    (v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), Class::Metadata),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Class::Private),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Class::Private),
    // Among them Teredo, which embeds addresses of IPv4.
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), Class::Reserved),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), Class::Reserved),
    (SIX_TO_FOUR, Class::Reserved),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Class::Reserved),
];

/// Global unicast addresses of IPv6.
pub(super) const GLOBAL: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// Prefix of translated addresses of IPv4 (RFC 6052).
pub(super) const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);
const SIX_TO_FOUR: Ipv6Net = v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16);
/// IPv4-compatible and IPv4-mapped addresses.
const COMPATIBLE: Ipv6Net = v6([0, 0, 0, 0, 0, 0, 0, 0], 96);
const MAPPED: Ipv6Net = v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96);

/// Metadata services that credentials of a machine or pod are asked of.
pub(super) const CREDENTIAL_SERVICES: [IpNet; 5] = [
    IpNet::V4(v4([169, 254, 169, 254], 32)),
    IpNet::V4(v4([169, 254, 170, 2], 32)),
    IpNet::V4(v4([169, 254, 170, 23], 32)),
    IpNet::V6(v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128)),
    IpNet::V6(v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23], 128)),
];

/// Returns the address of IPv4 that `address` embeds: mapped, compatible, NAT64 or 6to4; else `address`.
pub(super) fn embedded(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let [.., a, b, c, d] = v6.octets();
    if v6.is_unspecified() || v6.is_loopback() {
        return address;
    }
    if [MAPPED, COMPATIBLE, NAT64].iter().any(|block| block.contains(&v6)) {
        return Ipv4Addr::new(a, b, c, d).into();
    }
    if SIX_TO_FOUR.contains(&v6) {
        let [_, _, a, b, c, d, ..] = v6.octets();
        return Ipv4Addr::new(a, b, c, d).into();
    }
    address
}

/// Returns the class of an address that embeds no other, and the block that decides.
pub(super) fn class(address: IpAddr) -> (Class, Option<IpNet>) {
    match address {
        IpAddr::V4(address) => {
            let found = V4.iter().find(|(block, _)| block.contains(&address));
            found.map_or((Class::Public, None), |(block, class)| (*class, Some(IpNet::V4(*block))))
        }
        IpAddr::V6(address) => {
            let found = V6.iter().find(|(block, _)| block.contains(&address));
            let outside = if GLOBAL.contains(&address) { Class::Public } else { Class::Reserved };
            found.map_or((outside, None), |(block, class)| (*class, Some(IpNet::V6(*block))))
        }
    }
}

/// Returns the block of translated addresses of `block`.
pub(super) fn translated(block: Ipv4Net) -> Option<Ipv6Net> {
    let prefix = u128::from(NAT64.network());
    let network = Ipv6Addr::from(prefix | u128::from(u32::from(block.network())));
    Ipv6Net::new(network, NAT64.prefix_len() + block.prefix_len()).ok()
}

/// Returns the blocks that a wider range does not allow.
pub(super) fn unnamed() -> impl Iterator<Item = IpNet> {
    let v4 = V4.iter().map(|(block, class)| (IpNet::V4(*block), *class));
    let v6 = V6.iter().map(|(block, class)| (IpNet::V6(*block), *class));
    v4.chain(v6)
        .filter(|(_, class)| matches!(class, Class::Metadata | Class::Unusable))
        .map(|(block, _)| block)
}
