//! Egress rules: which hosts and addresses the fetcher may connect to.
//!
//! A URL is checked before each request, of a retry or a redirect as well. Addresses of names are checked where they
//! are resolved, and the connection is made to the addresses that were checked: a DNS answer that changes is checked
//! again.

mod blocks;
mod rule;

pub use rule::{Rule, RuleError};

use blocks::{Class, class, embedded};
use ipnet::IpNet;
use reqwest::Url;
use rule::HostPattern;
use std::fmt;
use std::net::IpAddr;

/// Hosts and addresses that may be connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Egress {
    /// Names that sources may have; none: any.
    hosts: Vec<HostPattern>,
    /// Addresses beside public ones.
    ranges: Vec<IpNet>,
    /// Addresses that are refused, whatever else is allowed.
    refused: Vec<IpNet>,
    /// Loopback and private addresses are allowed.
    private: bool,
}

/// A host or an address that no rule allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{target} is not an allowed source: {problem}")]
pub struct NotAllowed {
    target: String,
    problem: String,
}

/// Any host with a public or private address, as users of a machine need it: mirrors are often nearby.
impl Default for Egress {
    fn default() -> Self {
        Self { hosts: Vec::new(), ranges: Vec::new(), refused: Vec::new(), private: true }
    }
}

/// Public addresses alone, but for what the rules say.
impl FromIterator<Rule> for Egress {
    fn from_iter<T: IntoIterator<Item = Rule>>(rules: T) -> Self {
        let mut egress = Self { private: false, ..Self::default() };
        for rule in rules {
            match rule {
                Rule::Host(pattern) => egress.hosts.push(pattern),
                Rule::Range(range) => egress.ranges.push(range),
                Rule::Refused(range) => egress.refused.push(range),
            }
        }
        egress
    }
}

impl Egress {
    /// Checks what a URL says of its host: the name, or the address that stands in place of one.
    ///
    /// # Errors
    /// No rule allows it.
    pub fn check_url(&self, url: &Url) -> Result<(), NotAllowed> {
        let refused = |target: &str, problem: String| Err(NotAllowed { target: target.to_owned(), problem });
        let Some(text) = url.host_str().filter(|text| !text.is_empty()) else {
            return refused(url.scheme(), "missing host".to_owned());
        };
        let literal = address_in(text);
        // A range names the address itself, and a name only with what it resolves to.
        let is_named = literal.is_some_and(|address| self.lists(address))
            || self.hosts.is_empty()
            || self.hosts.iter().any(|pattern| pattern.matches(text, url.port_or_known_default()));
        if !is_named {
            return refused(text, "no allowed host has this name and port".to_owned());
        }
        literal.map_or(Ok(()), |address| self.check_address(address).map_err(|problem| problem.of(text)))
    }

    /// Checks a URL in a text.
    ///
    /// # Errors
    /// It is no URL, or no rule allows its host.
    pub fn check_text(&self, text: &str) -> Result<(), NotAllowed> {
        let url = Url::parse(text)
            .map_err(|error| NotAllowed { target: "the URL".to_owned(), problem: error.to_string() })?;
        self.check_url(&url)
    }

    /// Checks an address that is to be connected to.
    pub(crate) fn check_address(&self, address: IpAddr) -> Result<(), RefusedAddress> {
        let inner = embedded(address);
        let (class, block) = class(inner);
        let is_refused = self.refused.iter().any(|range| range.contains(&address) || range.contains(&inner));
        let is_allowed = match class {
            Class::Public => true,
            Class::Private => self.private || self.lists(address),
            Class::Reserved => self.lists(address),
            // A wide range does not mean these: one that names them lies within their block.
            Class::Metadata => self
                .ranges
                .iter()
                .any(|range| range.contains(&inner) && block.is_some_and(|block| block.contains(range))),
            Class::Unusable => false,
        };
        if is_allowed && !is_refused { Ok(()) } else { Err(RefusedAddress { address, class, is_refused }) }
    }

    /// Reports if a range contains `address`, or the one that it embeds.
    fn lists(&self, address: IpAddr) -> bool {
        let inner = embedded(address);
        self.ranges.iter().any(|range| range.contains(&address) || range.contains(&inner))
    }

    /// Reports if some host below `domain` may be connected to, for sources of which the whole name is not known.
    #[must_use]
    pub fn allows_below(&self, domain: &str) -> bool {
        self.hosts.is_empty() || self.hosts.iter().any(|pattern| pattern.is_below(domain))
    }

    /// Returns these rules with the metadata services that hand out credentials.
    pub(crate) fn with_credential_services(mut self) -> Self {
        self.ranges.extend(Self::credential_services());
        self
    }

    /// Returns the addresses of metadata services that hand out credentials.
    #[must_use]
    pub fn credential_services() -> [IpNet; 5] {
        blocks::CREDENTIAL_SERVICES
    }

    /// Returns the blocks that rules allow beside public addresses, each with the blocks in it that are refused or that
    /// a wide range does not name.
    #[must_use]
    pub fn allowed_blocks(&self) -> Vec<(IpNet, Vec<IpNet>)> {
        let unnamed: Vec<IpNet> = blocks::unnamed().chain(self.refused.iter().copied()).collect();
        let is_refused = |block: &&IpNet| self.refused.iter().any(|range| range.contains(*block));
        let left = self.ranges.iter().filter(|block| !is_refused(block));
        left.map(|block| {
            let inside = unnamed.iter().filter(|range| block.contains(*range) && *range != block);
            (*block, inside.copied().collect())
        })
        .collect()
    }

    /// Returns blocks that hold all public addresses, each with the blocks in it that are not public or refused.
    #[must_use]
    pub fn public_blocks(&self) -> Vec<(IpNet, Vec<IpNet>)> {
        let everything = ipnet::Ipv4Net::default();
        let not_public = || blocks::V4.iter().map(|(block, _)| *block);
        let of_v6 = blocks::V6.iter().map(|(block, _)| IpNet::V6(*block));
        let translated = not_public().filter_map(blocks::translated).map(IpNet::V6);
        let blocks: [(IpNet, Vec<IpNet>); 3] = [
            (IpNet::V4(everything), not_public().map(IpNet::V4).collect()),
            (IpNet::V6(blocks::GLOBAL), of_v6.collect()),
            (IpNet::V6(blocks::NAT64), translated.collect()),
        ];
        let translated = self.refused.iter().filter_map(|range| match range {
            IpNet::V4(range) => blocks::translated(*range).map(IpNet::V6),
            IpNet::V6(_) => None,
        });
        let refused: Vec<IpNet> = self.refused.iter().copied().chain(translated).collect();
        let left = blocks.into_iter().filter(|(block, _)| !refused.iter().any(|range| range.contains(block)));
        left.map(|(block, except)| {
            let inside = except.into_iter().chain(refused.iter().copied());
            (block, inside.filter(|range| block.contains(range)).collect())
        })
        .collect()
    }
}

/// The rules as `--allow-source` takes them.
impl fmt::Display for Egress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts.iter().cloned().map(Rule::Host);
        let any = self.hosts.is_empty().then(|| Rule::Host(HostPattern::any()));
        let ranges = self.ranges.iter().copied().map(Rule::Range);
        let refused = self.refused.iter().copied().map(Rule::Refused);
        for (at, rule) in any.into_iter().chain(hosts).chain(ranges).chain(refused).enumerate() {
            write!(formatter, "{}{rule}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Refusal of an address.
pub(crate) struct RefusedAddress {
    address: IpAddr,
    class: Class,
    is_refused: bool,
}

impl RefusedAddress {
    /// Returns the refusal of the host that has the address.
    pub(crate) fn of(self, host: &str) -> NotAllowed {
        let Self { address, class, is_refused } = self;
        let class = if is_refused { "in a refused range" } else { class.name() };
        NotAllowed { target: host.to_owned(), problem: format!("its address {address} is {class}") }
    }
}

/// The address that stands in place of a name in a URL.
pub(crate) fn address_in(host: &str) -> Option<IpAddr> {
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inner.unwrap_or(host).parse().ok()
}

#[cfg(test)]
mod tests;
