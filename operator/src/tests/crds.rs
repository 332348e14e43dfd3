use remoe_api::crds;
use std::path::Path;

#[test]
fn the_committed_definitions_are_the_generated_ones() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds");
    let generated = crds().unwrap();
    for (name, yaml) in &generated {
        let committed = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(committed == *yaml, "crds/{name} is out of date; run: remoe-operator crds --out crds");
    }
    let files = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(files, generated.len(), "crds/ holds something else");
}

/// Raw numbers have no unit, and too many digits.
#[test]
fn columns_show_no_fractions() {
    for (name, yaml) in crds().unwrap() {
        let crd: serde_json::Value = serde_yaml::from_str(&yaml).unwrap();
        for column in crd["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap() {
            assert_ne!(column["type"], "number", "{name}: {column}");
        }
    }
}

#[test]
fn every_field_is_explained() {
    let (_, yaml) = crds().unwrap().into_iter().next().unwrap();
    let crd: serde_json::Value = serde_yaml::from_str(&yaml).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    for part in ["spec", "status"] {
        explained(part, &schema[part]);
    }
}

fn explained(path: &str, schema: &serde_json::Value) {
    let Some(properties) = schema["properties"].as_object() else { return };
    for (name, schema) in properties {
        let path = format!("{path}.{name}");
        assert!(schema["description"].is_string(), "{path} has no description");
        explained(&path, schema);
    }
}
