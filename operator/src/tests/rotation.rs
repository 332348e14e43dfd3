//! Certificates of a deployment after a rotation of its identities.

use crate::identity::{IssuerRef, StoredCertificate, certificate, identity_of, renewal_reason};
use crate::names::Component;
use crate::testing::example::deployment;
use crate::testing::world::World;
use kube::ResourceExt;
use remoe_api::{IDENTITY_ROTATED_AT, MoEDeployment};
use remoe_identity::Authority;
use remoe_proto::identity::Identity;
use serde_json::json;
use std::time::{Duration, SystemTime};

const LIFE: Duration = Duration::from_secs(24 * 3600);
const PARTS: [Component; 2] = [Component::Main, Component::RemoteExpert];

fn rotated(at: &str) -> MoEDeployment {
    let mut owner = deployment(json!({}));
    owner.annotations_mut().insert(IDENTITY_ROTATED_AT.to_owned(), at.to_owned());
    owner
}

#[test]
fn rotation_gives_functions_another_name() {
    let name = |owner: &MoEDeployment, part| identity_of(owner, part);
    let before = deployment(json!({}));
    for part in PARTS {
        assert_eq!(name(&rotated(""), part), name(&before, part));
        let (one, two) = (name(&rotated("2026-01-01T00:00:00Z"), part), name(&rotated("2"), part));
        assert!(one != name(&before, part) && two != name(&before, part) && one != two);
        // The identity survives a round trip, whatever the annotation says.
        for at in ["2", "é/../\u{0}", &"x".repeat(9000)] {
            let named = name(&rotated(at), part);
            assert_eq!(named.to_string().parse::<Identity>().ok(), Some(named));
        }
    }
    // Main and remote functions of one rotation trust each other.
    let owner = rotated("2");
    assert_eq!(name(&owner, Component::Main).remote(), Some(name(&owner, Component::RemoteExpert)));
}

#[test]
fn certificates_are_issued_again_after_a_rotation() {
    let (authority, _) = Authority::create(30 * LIFE).unwrap();
    let root = authority.certificate();
    for part in PARTS {
        let old = identity_of(&deployment(json!({})), part);
        let new = identity_of(&rotated("2"), part);
        let held = StoredCertificate::new(authority.sign(&old, LIFE).unwrap(), root);
        let why = |wanted: &Identity| renewal_reason(Some(&held), wanted, root, LIFE, SystemTime::now());
        assert_eq!(why(&old), None);
        assert!(why(&new).is_some_and(|reason| reason.to_string().contains("another identity")));
        // The same applies to cert-manager.
        let issuer = IssuerRef { name: "ca".to_owned(), kind: "Issuer".to_owned() };
        let asked = |owner: &MoEDeployment| {
            let object = certificate(owner, part, &identity_of(owner, part), &issuer, LIFE);
            serde_json::to_value(object.spec).unwrap()["uris"].clone()
        };
        assert_eq!(asked(&rotated("2")), json!([new.to_string()]));
    }
}

#[test]
fn gateways_ask_for_the_name_after_a_rotation() {
    let mut world = World::with_gateways(json!({}), &["g1"]);
    world.settle();
    let asked = |world: &World| {
        let mains = world.demand().spec.mains.iter();
        mains.map(|main| main.identity.clone().unwrap()).collect::<Vec<_>>()
    };
    let before = asked(&world);
    let pods = world.observed.pods.clone();
    world.owner.annotations_mut().insert(IDENTITY_ROTATED_AT.to_owned(), "2".to_owned());
    world.settle();
    let after = asked(&world);
    assert_eq!(after, [identity_of(&world.owner, Component::Main).to_string()]);
    assert_ne!(before, after);
    assert_eq!(world.observed.pods.len(), pods.len(), "no pod is replaced");
}
