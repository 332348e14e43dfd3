#![allow(clippy::unwrap_used)]

use super::*;

fn rules(texts: &[&str]) -> Egress {
    texts.iter().map(|text| text.parse::<EgressRule>().unwrap()).collect()
}

fn allows_address(egress: &Egress, address: &str) -> bool {
    egress.check_address(address.parse().unwrap()).is_ok()
}

fn allows_url(egress: &Egress, url: &str) -> bool {
    egress.check_url(&Url::parse(url).unwrap()).is_ok()
}

const PUBLIC: [&str; 6] =
    ["8.8.8.8", "100.63.255.255", "172.32.0.1", "2606:4700::1", "64:ff9b::808:808", "2002:808:808::1"];
const PRIVATE: [&str; 15] = [
    "10.0.0.1",
    "127.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fd00::1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::10.0.0.1",
    "64:ff9b::10.0.0.1",
    "2002:a00:1::1",
    "2002:7f00:1::",
    "fc00::",
    "fdff::1",
];
const METADATA: [&str; 11] = [
    "169.254.169.254",
    "169.254.0.1",
    "fe80::1",
    "::ffff:169.254.169.254",
    "::169.254.169.254",
    "64:ff9b::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "168.63.129.16",
];
const RESERVED: [&str; 9] = [
    "192.0.0.1",
    "198.18.0.1",
    "203.0.113.1",
    "240.0.0.1",
    "2001::1",
    "2001:db8::1",
    "64:ff9b:1::1",
    "::ffff:0:10.0.0.1",
    "fec0::1",
];
const UNUSABLE: [&str; 8] =
    ["0.0.0.0", "0.1.2.3", "255.255.255.255", "224.0.0.1", "::", "ff02::1", "::ffff:0.0.0.0", "64:ff9b::"];

#[test]
fn default_rules_allow_public_and_private_addresses() {
    let egress = Egress::default();
    for address in PUBLIC.iter().chain(&PRIVATE) {
        assert!(allows_address(&egress, address), "{address}");
    }
    for address in METADATA.iter().chain(&RESERVED).chain(&UNUSABLE) {
        assert!(!allows_address(&egress, address), "{address}");
    }
}

#[test]
fn rules_without_range_allow_public_addresses_only() {
    let egress = rules(&["*"]);
    for address in PUBLIC {
        assert!(allows_address(&egress, address), "{address}");
    }
    for address in PRIVATE.iter().chain(&METADATA).chain(&RESERVED).chain(&UNUSABLE) {
        assert!(!allows_address(&egress, address), "{address}");
    }
}

#[test]
fn range_allows_embedded_forms_of_its_addresses() {
    let egress = rules(&["10.1.0.0/16", "fd01::/16", "198.18.0.0/15"]);
    for address in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd01::9", "198.18.0.1"] {
        assert!(allows_address(&egress, address), "{address}");
    }
    assert!(!allows_address(&egress, "10.2.0.1") && !allows_address(&egress, "fd02::9"));
}

#[test]
fn wide_range_does_not_include_metadata_services() {
    let wide = rules(&["0.0.0.0/0", "::/0"]);
    for address in METADATA.iter().chain(&UNUSABLE) {
        assert!(!allows_address(&wide, address), "{address}");
    }
    assert!(allows_address(&wide, "10.0.0.1") && allows_address(&wide, "240.0.0.1"));
    let named = rules(&["169.254.169.254/32"]);
    assert!(allows_address(&named, "169.254.169.254") && !allows_address(&named, "169.254.170.2"));
    assert!(allows_address(&Egress::default().with_credential_services(), "fd00:ec2::23"));
}

#[test]
fn refused_range_overrides_allowed_range() {
    let egress = rules(&["*", "10.0.0.0/8", "!10.96.0.0/12", "!8.8.8.0/24"]);
    assert!(allows_address(&egress, "10.0.0.1") && allows_address(&egress, "8.8.4.4"));
    for address in ["10.96.0.1", "8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"] {
        assert!(!allows_address(&egress, address), "{address}");
    }
}

#[test]
fn host_patterns_limit_names_and_ports() {
    let egress = rules(&["huggingface.co", "*.HF.co", "cdn-lfs*.huggingface.co", "minio.store.svc:9000"]);
    for url in [
        "https://huggingface.co/x",
        "https://huggingface.co./x",
        "https://HUGGINGFACE.co:8443",
        "https://cas-bridge.xethub.hf.co",
        "https://cdn-lfs-us-1.huggingface.co",
        "http://minio.store.svc:9000",
    ] {
        assert!(allows_url(&egress, url), "{url}");
    }
    for url in [
        "https://hf.co",
        "https://nothf.co",
        "https://huggingface.co.example",
        "https://example/huggingface.co",
        "https://x.huggingface.co",
        "http://minio.store.svc",
        "https://8.8.8.8",
    ] {
        assert!(!allows_url(&egress, url), "{url}");
    }
}

#[test]
fn address_in_url_is_checked_in_all_spellings() {
    for url in [
        "http://169.254.169.254/latest",
        "http://0xa9fea9fe/",
        "http://2852039166/",
        "http://0251.0376.0251.0376/",
        "http://169.254.43518/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1]/",
        "http://0/",
    ] {
        assert!(!allows_url(&Egress::default(), url), "{url}");
    }
    assert!(allows_url(&Egress::default(), "http://127.0.0.1:8000"));
    assert!(!allows_url(&rules(&["*"]), "http://127.0.0.1:8000"));
    // An allowed literal address needs no host rule.
    assert!(allows_url(&rules(&["huggingface.co", "10.1.2.3"]), "http://10.1.2.3:9000"));
    assert!(!allows_url(&rules(&["10.1.2.3.example"]), "http://10.1.2.3:9000"));
}

#[test]
fn rules_round_trip_as_text() {
    let text = "*.hf.co,minio:9000,10.0.0.0/8,fd01::/16,!10.96.0.0/12";
    let egress: Egress = text.split(',').map(|rule| rule.parse::<EgressRule>().unwrap()).collect();
    assert_eq!(egress.to_string(), text);
    assert_eq!(rules(&[]).to_string(), "*");
    assert_eq!(rules(&["10.1.2.3/8"]).to_string(), "*,10.0.0.0/8");
}

#[test]
fn invalid_rule_is_refused() {
    for text in [
        "",
        "!",
        "!host",
        "a..b",
        "a b",
        "host:",
        "host:0",
        "host:x",
        "hf.*",
        "s3.*om",
        "10.0.0.1:80",
        "[::1]:80",
        "10.0.0.0/33",
        "https://host",
        "a,b",
        ".host",
        "..",
    ] {
        assert!(text.parse::<EgressRule>().is_err(), "{text:?}");
    }
}

#[test]
fn pattern_reports_possible_subdomains() {
    for pattern in ["*", "*.amazonaws.com", "s3.*.amazonaws.com", "b.s3.eu-west-1.amazonaws.com"] {
        assert!(rules(&[pattern]).allows_below("amazonaws.com"), "{pattern}");
    }
    for pattern in ["*.example", "amazonaws.com.example", "notamazonaws.com"] {
        assert!(!rules(&[pattern]).allows_below("amazonaws.com"), "{pattern}");
    }
}

#[test]
fn public_blocks_exclude_refused_ranges() {
    let egress = rules(&["*", "!52.0.0.0/8", "!2a00::/16"]);
    let allows_url = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        egress.public_blocks().iter().any(|(block, exceptions)| {
            block.contains(&address) && !exceptions.iter().any(|range| range.contains(&address))
        })
    };
    for address in ["8.8.8.8", "2606:4700::1", "64:ff9b::808:808"] {
        assert!(allows_url(address), "{address}");
    }
    let refused = ["52.1.2.3", "2a00::1", "64:ff9b::52.1.2.3"];
    for address in PRIVATE.iter().chain(&METADATA).chain(&RESERVED).chain(&UNUSABLE).chain(&refused) {
        assert!(!allows_url(address), "{address}");
    }
    // Kubernetes requires exceptions to be smaller than their block.
    assert!(egress.public_blocks().iter().all(|(block, exceptions)| !exceptions.contains(block)));
    assert_eq!(rules(&["!0.0.0.0/0"]).public_blocks().len(), 1);
}

#[test]
fn allowed_blocks_exclude_metadata_services() {
    let egress =
        rules(&["0.0.0.0/0", "::/0", "169.254.169.254", "!10.0.0.0/8", "!192.168.0.0/16", "192.168.1.0/24"]);
    let allows_url = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        egress.allowed_blocks().iter().any(|(block, exceptions)| {
            block.contains(&address) && !exceptions.iter().any(|range| range.contains(&address))
        })
    };
    assert!(allows_url("172.16.0.1") && allows_url("fd00::1") && allows_url("169.254.169.254"));
    for address in ["10.0.0.1", "192.168.1.1", "169.254.170.2", "100.100.100.200", "fe80::1", "fd00:ec2::254"]
    {
        assert!(!allows_url(address), "{address}");
    }
}
