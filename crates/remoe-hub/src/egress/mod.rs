//! Egress rules: the hosts and addresses that the fetcher may connect to.
//!
//! The client checks the URL of each request, also after redirects and for retries. The resolver checks the addresses
//! of names, and the connection uses these checked addresses. Therefore a DNS answer that changes later (DNS rebinding)
//! cannot bypass the rules.

mod blocks;
mod rule;

pub use rule::{EgressRule, RuleError};

use blocks::{AddressClass, classify, unwrap_embedded};
use ipnet::IpNet;
use reqwest::Url;
use rule::HostPattern;
use std::fmt;
use std::net::IpAddr;

/// Hosts and addresses that may be connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Egress {
    /// Allowed host names. Empty: all names are allowed.
    hosts: Vec<HostPattern>,
    /// Allowed addresses, beside public ones.
    ranges: Vec<IpNet>,
    /// Refused addresses, which take precedence over allowed ones.
    refused: Vec<IpNet>,
    /// Loopback and private addresses are allowed.
    allows_private: bool,
}

/// Refusal of a host or an address that no rule allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{target} is not an allowed source: {problem}")]
pub struct NotAllowed {
    target: String,
    problem: String,
}

/// Allows hosts with a public or private address, because mirrors are often in the local network.
impl Default for Egress {
    fn default() -> Self {
        Self { hosts: Vec::new(), ranges: Vec::new(), refused: Vec::new(), allows_private: true }
    }
}

/// Allows public addresses, and the addresses that the rules add.
impl FromIterator<EgressRule> for Egress {
    fn from_iter<T: IntoIterator<Item = EgressRule>>(rules: T) -> Self {
        let mut egress = Self { allows_private: false, ..Self::default() };
        for rule in rules {
            match rule {
                EgressRule::Host(pattern) => egress.hosts.push(pattern),
                EgressRule::Range(range) => egress.ranges.push(range),
                EgressRule::Refused(range) => egress.refused.push(range),
            }
        }
        egress
    }
}

impl Egress {
    /// Checks the host of a URL, which is a name or an address.
    ///
    /// # Errors
    /// No rule allows the host.
    pub fn check_url(&self, url: &Url) -> Result<(), NotAllowed> {
        let refused = |target: &str, problem: String| Err(NotAllowed { target: target.to_owned(), problem });
        let Some(text) = url.host_str().filter(|text| !text.is_empty()) else {
            return refused(url.scheme(), "missing host".to_owned());
        };
        let literal = parse_host_address(text);
        // A rule with a range allows a literal address. The resolver checks the addresses of names.
        let is_named = literal.is_some_and(|address| self.is_in_allowed_range(address))
            || self.hosts.is_empty()
            || self.hosts.iter().any(|pattern| pattern.matches(text, url.port_or_known_default()));
        if !is_named {
            return refused(text, "no allowed host has this name and port".to_owned());
        }
        literal
            .map_or(Ok(()), |address| self.check_address(address).map_err(|problem| problem.for_host(text)))
    }

    /// Parses `text` as a URL, and checks its host.
    ///
    /// # Errors
    /// The text is not a URL, or no rule allows its host.
    pub fn check_text(&self, text: &str) -> Result<(), NotAllowed> {
        let url = Url::parse(text)
            .map_err(|error| NotAllowed { target: "the URL".to_owned(), problem: error.to_string() })?;
        self.check_url(&url)
    }

    /// Checks an address before a connection to it.
    pub(crate) fn check_address(&self, address: IpAddr) -> Result<(), RefusedAddress> {
        let inner = unwrap_embedded(address);
        let (class, block) = classify(inner);
        let is_refused = self.refused.iter().any(|range| range.contains(&address) || range.contains(&inner));
        let is_allowed = match class {
            AddressClass::Public => true,
            AddressClass::Private => self.allows_private || self.is_in_allowed_range(address),
            AddressClass::Reserved => self.is_in_allowed_range(address),
            // A wide range does not include these. An explicit range lies within their block.
            AddressClass::Metadata => self
                .ranges
                .iter()
                .any(|range| range.contains(&inner) && block.is_some_and(|block| block.contains(range))),
            AddressClass::Unusable => false,
        };
        if is_allowed && !is_refused { Ok(()) } else { Err(RefusedAddress { address, class, is_refused }) }
    }

    /// Reports if an allowed range contains `address`, or the IPv4 address that it embeds.
    fn is_in_allowed_range(&self, address: IpAddr) -> bool {
        let inner = unwrap_embedded(address);
        self.ranges.iter().any(|range| range.contains(&address) || range.contains(&inner))
    }

    /// Reports if a rule can allow some subdomain of `domain`. For sources whose full name is not yet known.
    #[must_use]
    pub fn allows_below(&self, domain: &str) -> bool {
        self.hosts.is_empty() || self.hosts.iter().any(|pattern| pattern.is_below(domain))
    }

    /// Adds the metadata services that hand out credentials to the allowed ranges.
    pub(crate) fn with_credential_services(mut self) -> Self {
        self.ranges.extend(Self::credential_services());
        self
    }

    /// Returns the addresses of metadata services that hand out credentials.
    #[must_use]
    pub fn credential_services() -> [IpNet; 5] {
        blocks::CREDENTIAL_SERVICES
    }

    /// Returns the allowed ranges, each with its exceptions: refused ranges, and blocks that a wide range excludes.
    #[must_use]
    pub fn allowed_blocks(&self) -> Vec<(IpNet, Vec<IpNet>)> {
        let exceptions: Vec<IpNet> =
            blocks::excluded_from_ranges().chain(self.refused.iter().copied()).collect();
        let is_refused = |block: &&IpNet| self.refused.iter().any(|range| range.contains(*block));
        let remaining = self.ranges.iter().filter(|block| !is_refused(block));
        remaining
            .map(|block| {
                let inside = exceptions.iter().filter(|range| block.contains(*range) && *range != block);
                (*block, inside.copied().collect())
            })
            .collect()
    }

    /// Returns blocks that contain all public addresses, each with its exceptions: blocks that are not public or refused.
    #[must_use]
    pub fn public_blocks(&self) -> Vec<(IpNet, Vec<IpNet>)> {
        let everything = ipnet::Ipv4Net::default();
        let not_public_v4 = || blocks::NON_PUBLIC_V4.iter().map(|(block, _)| *block);
        let not_public_v6 = blocks::NON_PUBLIC_V6.iter().map(|(block, _)| IpNet::V6(*block));
        let not_public_nat64 = not_public_v4().filter_map(blocks::nat64_block).map(IpNet::V6);
        let blocks: [(IpNet, Vec<IpNet>); 3] = [
            (IpNet::V4(everything), not_public_v4().map(IpNet::V4).collect()),
            (IpNet::V6(blocks::GLOBAL_UNICAST), not_public_v6.collect()),
            (IpNet::V6(blocks::NAT64), not_public_nat64.collect()),
        ];
        let refused_nat64 = self.refused.iter().filter_map(|range| match range {
            IpNet::V4(range) => blocks::nat64_block(*range).map(IpNet::V6),
            IpNet::V6(_) => None,
        });
        let refused: Vec<IpNet> = self.refused.iter().copied().chain(refused_nat64).collect();
        let remaining =
            blocks.into_iter().filter(|(block, _)| !refused.iter().any(|range| range.contains(block)));
        remaining
            .map(|(block, exceptions)| {
                let inside = exceptions.into_iter().chain(refused.iter().copied());
                (block, inside.filter(|range| block.contains(range)).collect())
            })
            .collect()
    }
}

/// Formats the rules as an argument of `--allow-source`.
impl fmt::Display for Egress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts.iter().cloned().map(EgressRule::Host);
        let any = self.hosts.is_empty().then(|| EgressRule::Host(HostPattern::any()));
        let ranges = self.ranges.iter().copied().map(EgressRule::Range);
        let refused = self.refused.iter().copied().map(EgressRule::Refused);
        for (index, rule) in any.into_iter().chain(hosts).chain(ranges).chain(refused).enumerate() {
            write!(formatter, "{}{rule}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Refusal of an address, before its host name is known.
pub(crate) struct RefusedAddress {
    address: IpAddr,
    class: AddressClass,
    is_refused: bool,
}

impl RefusedAddress {
    /// Converts to the refusal of `host`, which has the address.
    pub(crate) fn for_host(self, host: &str) -> NotAllowed {
        let Self { address, class, is_refused } = self;
        let class = if is_refused { "in a refused range" } else { class.name() };
        NotAllowed { target: host.to_owned(), problem: format!("its address {address} is {class}") }
    }
}

/// Parses the host of a URL as an address, with or without the brackets of IPv6.
pub(crate) fn parse_host_address(host: &str) -> Option<IpAddr> {
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inner.unwrap_or(host).parse().ok()
}

#[cfg(test)]
mod tests;
