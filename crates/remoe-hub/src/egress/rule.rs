//! One entry of `--allow-source`.

use ipnet::IpNet;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// An entry of a list of allowed sources: `HOST[:PORT]`, `CIDR` or `!CIDR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressRule {
    /// Allowed host names.
    Host(HostPattern),
    /// Addresses that are allowed in addition to public ones.
    Range(IpNet),
    /// Addresses that are refused.
    Refused(IpNet),
}

/// Pattern of host names, in which `*` matches any characters, with an optional port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPattern {
    name: String,
    port: Option<u16>,
}

/// Error of an entry that is not a valid rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid source {text:?}: {problem}; expected HOST[:PORT], CIDR or !CIDR, such as *.hf.co or 10.1.2.3/32"
)]
pub struct RuleError {
    text: String,
    problem: &'static str,
}

impl FromStr for EgressRule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let invalid = |problem| RuleError { text: text.to_owned(), problem };
        if let Some(range) = text.strip_prefix('!') {
            return parse_range(range).map(Self::Refused).ok_or_else(|| invalid("expected a CIDR after !"));
        }
        if let Some(range) = parse_range(text) {
            return Ok(Self::Range(range));
        }
        let (name, port) = match text.rsplit_once(':') {
            Some((name, port)) => {
                let port = port.parse().ok().filter(|port| *port > 0);
                (name, Some(port.ok_or_else(|| invalid("invalid port"))?))
            }
            None => (text, None),
        };
        if name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok() {
            return Err(invalid("expected an address without a port"));
        }
        let pattern = HostPattern { name: normalised(name), port };
        let is_allowed = |character: char| character.is_ascii_alphanumeric() || "-_.*".contains(character);
        if pattern.name.split('.').any(str::is_empty) || !pattern.name.chars().all(is_allowed) {
            return Err(invalid("invalid host name"));
        }
        let last = pattern.name.rsplit('.').next().unwrap_or_default();
        if last.contains('*') && pattern.name != "*" {
            return Err(invalid("* in the last label"));
        }
        Ok(Self::Host(pattern))
    }
}

/// Parses a CIDR, or an address as the CIDR that contains only it.
fn parse_range(text: &str) -> Option<IpNet> {
    let address = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse::<IpNet>().ok().or_else(address).map(|range| range.trunc())
}

/// Normalises a host name for comparison: lower case, without a trailing dot.
fn normalised(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

impl HostPattern {
    /// Returns the pattern of all hosts.
    pub(super) fn any() -> Self {
        Self { name: "*".to_owned(), port: None }
    }

    /// Reports if the pattern matches a host's name and port.
    pub(super) fn matches(&self, host: &str, port: Option<u16>) -> bool {
        (self.port.is_none() || self.port == port) && matches_wildcards(&self.name, &normalised(host))
    }

    /// Reports if the pattern can match a subdomain of `domain`.
    pub(super) fn is_below(&self, domain: &str) -> bool {
        let below = format!(".{domain}");
        match self.name.rsplit_once('*') {
            Some((_, end)) => end.ends_with(&below) || below.ends_with(end),
            None => self.name.ends_with(&below),
        }
    }
}

/// Reports if `text` matches a pattern in which `*` matches any characters.
fn matches_wildcards(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = rest.get(at + part.len()..).unwrap_or_default();
    }
    rest.ends_with(last)
}

impl fmt::Display for EgressRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(HostPattern { name, port: None }) => formatter.write_str(name),
            Self::Host(HostPattern { name, port: Some(port) }) => write!(formatter, "{name}:{port}"),
            Self::Range(range) => write!(formatter, "{range}"),
            Self::Refused(range) => write!(formatter, "!{range}"),
        }
    }
}
