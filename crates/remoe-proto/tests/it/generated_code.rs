//! The committed code equals the code generated from `proto/`. After a change of a contract, `make generate` (this
//! test with REMOE_UPDATE_GENERATED=1) rewrites it.

use std::{env, fs, path::Path};

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fresh = tempfile::tempdir().unwrap();
    let descriptors =
        protox::compile(["remoe/v1/expert.proto", "remoe/v1/main_model.proto"], [root.join("proto")])
            .unwrap();
    tonic_prost_build::configure()
        // Payloads stay in their receive buffer.
        .bytes(".")
        .out_dir(fresh.path())
        .compile_fds(descriptors)
        .unwrap();
    let generated = fs::read_to_string(fresh.path().join("remoe.v1.rs")).unwrap();
    let committed = root.join("src/generated/remoe.v1.rs");
    if env::var_os("REMOE_UPDATE_GENERATED").is_some() {
        fs::write(&committed, &generated).unwrap();
    }
    assert!(
        fs::read_to_string(&committed).unwrap() == generated,
        "src/generated/remoe.v1.rs is not what proto/ generates; run `make generate`"
    );
}
