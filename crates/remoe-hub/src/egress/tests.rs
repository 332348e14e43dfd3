#![allow(clippy::unwrap_used)]

use super::*;

fn rules(texts: &[&str]) -> Egress {
    texts.iter().map(|text| text.parse::<Rule>().unwrap()).collect()
}

fn allows(egress: &Egress, address: &str) -> bool {
    egress.check_address(address.parse().unwrap()).is_ok()
}

fn reaches(egress: &Egress, url: &str) -> bool {
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
fn machine_reaches_public_and_private_addresses_alone() {
    let egress = Egress::default();
    for address in PUBLIC.iter().chain(&PRIVATE) {
        assert!(allows(&egress, address), "{address}");
    }
    for address in METADATA.iter().chain(&RESERVED).chain(&UNUSABLE) {
        assert!(!allows(&egress, address), "{address}");
    }
}

#[test]
fn rules_without_range_reach_public_addresses_alone() {
    let egress = rules(&["*"]);
    for address in PUBLIC {
        assert!(allows(&egress, address), "{address}");
    }
    for address in PRIVATE.iter().chain(&METADATA).chain(&RESERVED).chain(&UNUSABLE) {
        assert!(!allows(&egress, address), "{address}");
    }
}

#[test]
fn range_allows_its_addresses_in_all_forms() {
    let egress = rules(&["10.1.0.0/16", "fd01::/16", "198.18.0.0/15"]);
    for address in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd01::9", "198.18.0.1"] {
        assert!(allows(&egress, address), "{address}");
    }
    assert!(!allows(&egress, "10.2.0.1") && !allows(&egress, "fd02::9"));
}

#[test]
fn wide_range_does_not_name_metadata_services() {
    let wide = rules(&["0.0.0.0/0", "::/0"]);
    for address in METADATA.iter().chain(&UNUSABLE) {
        assert!(!allows(&wide, address), "{address}");
    }
    assert!(allows(&wide, "10.0.0.1") && allows(&wide, "240.0.0.1"));
    let named = rules(&["169.254.169.254/32"]);
    assert!(allows(&named, "169.254.169.254") && !allows(&named, "169.254.170.2"));
    assert!(allows(&Egress::default().with_credential_services(), "fd00:ec2::23"));
}

#[test]
fn refused_range_wins() {
    let egress = rules(&["*", "10.0.0.0/8", "!10.96.0.0/12", "!8.8.8.0/24"]);
    assert!(allows(&egress, "10.0.0.1") && allows(&egress, "8.8.4.4"));
    for address in ["10.96.0.1", "8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"] {
        assert!(!allows(&egress, address), "{address}");
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
        assert!(reaches(&egress, url), "{url}");
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
        assert!(!reaches(&egress, url), "{url}");
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
        assert!(!reaches(&Egress::default(), url), "{url}");
    }
    assert!(reaches(&Egress::default(), "http://127.0.0.1:8000"));
    assert!(!reaches(&rules(&["*"]), "http://127.0.0.1:8000"));
    // A listed address needs no name.
    assert!(reaches(&rules(&["huggingface.co", "10.1.2.3"]), "http://10.1.2.3:9000"));
    assert!(!reaches(&rules(&["10.1.2.3.example"]), "http://10.1.2.3:9000"));
}

#[test]
fn rules_keep_their_form() {
    let text = "*.hf.co,minio:9000,10.0.0.0/8,fd01::/16,!10.96.0.0/12";
    let egress: Egress = text.split(',').map(|rule| rule.parse::<Rule>().unwrap()).collect();
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
        assert!(text.parse::<Rule>().is_err(), "{text:?}");
    }
}

#[test]
fn names_below_a_domain_are_known_of_patterns() {
    for pattern in ["*", "*.amazonaws.com", "s3.*.amazonaws.com", "b.s3.eu-west-1.amazonaws.com"] {
        assert!(rules(&[pattern]).allows_below("amazonaws.com"), "{pattern}");
    }
    for pattern in ["*.example", "amazonaws.com.example", "notamazonaws.com"] {
        assert!(!rules(&[pattern]).allows_below("amazonaws.com"), "{pattern}");
    }
}

#[test]
fn public_blocks_leave_out_what_is_refused() {
    let egress = rules(&["*", "!52.0.0.0/8", "!2a00::/16"]);
    let reaches = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        egress.public_blocks().iter().any(|(block, except)| {
            block.contains(&address) && !except.iter().any(|range| range.contains(&address))
        })
    };
    for address in ["8.8.8.8", "2606:4700::1", "64:ff9b::808:808"] {
        assert!(reaches(address), "{address}");
    }
    let bad = ["52.1.2.3", "2a00::1", "64:ff9b::52.1.2.3"];
    for address in PRIVATE.iter().chain(&METADATA).chain(&RESERVED).chain(&UNUSABLE).chain(&bad) {
        assert!(!reaches(address), "{address}");
    }
    // Kubernetes takes exceptions that are smaller than their block.
    assert!(egress.public_blocks().iter().all(|(block, except)| !except.contains(block)));
    assert_eq!(rules(&["!0.0.0.0/0"]).public_blocks().len(), 1);
}

#[test]
fn allowed_blocks_leave_out_metadata_services() {
    let egress =
        rules(&["0.0.0.0/0", "::/0", "169.254.169.254", "!10.0.0.0/8", "!192.168.0.0/16", "192.168.1.0/24"]);
    let reaches = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        egress.allowed_blocks().iter().any(|(block, except)| {
            block.contains(&address) && !except.iter().any(|range| range.contains(&address))
        })
    };
    assert!(reaches("172.16.0.1") && reaches("fd00::1") && reaches("169.254.169.254"));
    for address in ["10.0.0.1", "192.168.1.1", "169.254.170.2", "100.100.100.200", "fe80::1", "fd00:ec2::254"]
    {
        assert!(!reaches(address), "{address}");
    }
}
