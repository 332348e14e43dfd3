//! Classes of addresses: from the IANA special-purpose registries (RFC 6890), and of cloud metadata services.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// AddressClass of an address in egress rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AddressClass {
    /// Reachable over the internet.
    Public,
    /// Loopback, private and shared networks: machines, pods and Services.
    Private,
    /// Reserved, or for documentation.
    Reserved,
    /// Link-local, or a cloud's metadata service, which hands out credentials of the machine.
    Metadata,
    /// Unspecified, multicast or broadcast. A connection to the unspecified address reaches the machine itself.
    Unusable,
}

impl AddressClass {
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

/// IPv4 blocks that are not public. The first block that contains an address determines its class.
pub(super) const NON_PUBLIC_V4: [(Ipv4Net, AddressClass); 18] = [
    (v4([0, 0, 0, 0], 8), AddressClass::Unusable),
    (v4([255, 255, 255, 255], 32), AddressClass::Unusable),
    (v4([224, 0, 0, 0], 4), AddressClass::Unusable),
    (v4([169, 254, 0, 0], 16), AddressClass::Metadata),
    // Metadata services of Alibaba Cloud and Azure.
    (v4([100, 100, 100, 200], 32), AddressClass::Metadata),
    (v4([168, 63, 129, 16], 32), AddressClass::Metadata),
    (v4([127, 0, 0, 0], 8), AddressClass::Private),
    (v4([10, 0, 0, 0], 8), AddressClass::Private),
    (v4([172, 16, 0, 0], 12), AddressClass::Private),
    (v4([192, 168, 0, 0], 16), AddressClass::Private),
    (v4([100, 64, 0, 0], 10), AddressClass::Private),
    (v4([192, 0, 0, 0], 24), AddressClass::Reserved),
    (v4([192, 0, 2, 0], 24), AddressClass::Reserved),
    (v4([192, 88, 99, 0], 24), AddressClass::Reserved),
    (v4([198, 18, 0, 0], 15), AddressClass::Reserved),
    (v4([198, 51, 100, 0], 24), AddressClass::Reserved),
    (v4([203, 0, 113, 0], 24), AddressClass::Reserved),
    (v4([240, 0, 0, 0], 4), AddressClass::Reserved),
];

/// IPv6 blocks that are not public, beside all addresses outside of [`GLOBAL_UNICAST`].
pub(super) const NON_PUBLIC_V6: [(Ipv6Net, AddressClass); 11] = [
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), AddressClass::Unusable),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), AddressClass::Unusable),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), AddressClass::Metadata),
    // Metadata services of Amazon and Google.
    (v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32), AddressClass::Metadata),
    (v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), AddressClass::Metadata),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), AddressClass::Private),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), AddressClass::Private),
    // Includes Teredo, whose addresses embed IPv4 addresses.
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), AddressClass::Reserved),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), AddressClass::Reserved),
    (SIX_TO_FOUR, AddressClass::Reserved),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), AddressClass::Reserved),
];

/// IPv6 global unicast addresses.
pub(super) const GLOBAL_UNICAST: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// NAT64 prefix of translated IPv4 addresses (RFC 6052).
pub(super) const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);
/// 6to4 addresses (RFC 3056), which embed an IPv4 address.
const SIX_TO_FOUR: Ipv6Net = v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16);
/// IPv4-compatible IPv6 addresses (RFC 4291).
const IPV4_COMPATIBLE: Ipv6Net = v6([0, 0, 0, 0, 0, 0, 0, 0], 96);
/// IPv4-mapped IPv6 addresses (RFC 4291).
const IPV4_MAPPED: Ipv6Net = v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96);

/// Metadata services that hand out credentials of a machine or pod.
pub(super) const CREDENTIAL_SERVICES: [IpNet; 5] = [
    IpNet::V4(v4([169, 254, 169, 254], 32)),
    IpNet::V4(v4([169, 254, 170, 2], 32)),
    IpNet::V4(v4([169, 254, 170, 23], 32)),
    IpNet::V6(v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128)),
    IpNet::V6(v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23], 128)),
];

/// Returns the IPv4 address that a mapped, compatible, NAT64 or 6to4 `address` embeds. Returns other addresses unchanged.
pub(super) fn unwrap_embedded(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let [.., a, b, c, d] = v6.octets();
    if v6.is_unspecified() || v6.is_loopback() {
        return address;
    }
    if [IPV4_MAPPED, IPV4_COMPATIBLE, NAT64].iter().any(|block| block.contains(&v6)) {
        return Ipv4Addr::new(a, b, c, d).into();
    }
    if SIX_TO_FOUR.contains(&v6) {
        let [_, _, a, b, c, d, ..] = v6.octets();
        return Ipv4Addr::new(a, b, c, d).into();
    }
    address
}

/// Returns the class of an address, and the block that determines it. Call [`unwrap_embedded`] first.
pub(super) fn classify(address: IpAddr) -> (AddressClass, Option<IpNet>) {
    match address {
        IpAddr::V4(address) => {
            let found = NON_PUBLIC_V4.iter().find(|(block, _)| block.contains(&address));
            found.map_or((AddressClass::Public, None), |(block, class)| (*class, Some(IpNet::V4(*block))))
        }
        IpAddr::V6(address) => {
            let found = NON_PUBLIC_V6.iter().find(|(block, _)| block.contains(&address));
            let outside =
                if GLOBAL_UNICAST.contains(&address) { AddressClass::Public } else { AddressClass::Reserved };
            found.map_or((outside, None), |(block, class)| (*class, Some(IpNet::V6(*block))))
        }
    }
}

/// Returns the NAT64 block into which `block` is translated.
pub(super) fn nat64_block(block: Ipv4Net) -> Option<Ipv6Net> {
    let prefix = u128::from(NAT64.network());
    let network = Ipv6Addr::from(prefix | u128::from(u32::from(block.network())));
    Ipv6Net::new(network, NAT64.prefix_len() + block.prefix_len()).ok()
}

/// Returns the blocks that a wider allowed range does not include: metadata services and unusable addresses.
pub(super) fn excluded_from_ranges() -> impl Iterator<Item = IpNet> {
    let v4 = NON_PUBLIC_V4.iter().map(|(block, class)| (IpNet::V4(*block), *class));
    let v6 = NON_PUBLIC_V6.iter().map(|(block, class)| (IpNet::V6(*block), *class));
    v4.chain(v6)
        .filter(|(_, class)| matches!(class, AddressClass::Metadata | AddressClass::Unusable))
        .map(|(block, _)| block)
}
