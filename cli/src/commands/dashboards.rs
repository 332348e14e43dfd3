//! `remoe dashboards`: what a Prometheus and a Grafana need to show what `remoe up` serves and costs.

use crate::args::DashboardsArgs;
use crate::exit::CliError;
use crate::output::json;
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};

/// As they are in the Helm chart.
const DASHBOARDS: [(&str, &str); 4] = [
    ("cost.json", include_str!("../../../charts/remoe/files/dashboards/cost.json")),
    ("serving.json", include_str!("../../../charts/remoe/files/dashboards/serving.json")),
    ("plan.json", include_str!("../../../charts/remoe/files/dashboards/plan.json")),
    ("health.json", include_str!("../../../charts/remoe/files/dashboards/health.json")),
];
const RULES: &str = include_str!("../../../charts/remoe/files/rules/remoe.yaml");

#[derive(Serialize)]
struct Written {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

/// Writes the files, and says how to start what reads them.
pub(crate) fn run(args: &DashboardsArgs, as_json: bool) -> Result<(), CliError> {
    let failed = |path: &Path, error: &dyn std::fmt::Display| CliError {
        path: Some(path.to_owned()),
        ..CliError::runtime(format!("cannot write {}: {error}", path.display()))
    };
    let folder = std::path::absolute(&args.folder).map_err(|error| failed(&args.folder, &error))?;
    let mut files = Vec::new();
    for (name, text) in contents(args, &folder)? {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(&folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|error| failed(&path, &error))?;
        files.push(path);
    }
    if as_json {
        return Ok(json::print(&Written { folder, files })?);
    }
    let shown = folder.display();
    anstream::println!(
        "Wrote {} files to {shown}. Start both:\n\n  prometheus --config.file={shown}/prometheus.yml \
         --storage.tsdb.path={shown}/data\n  GF_PATHS_PROVISIONING={shown}/grafana/provisioning grafana server \
         --homepath /usr/share/grafana\n\nGrafana shows the dashboards at http://127.0.0.1:3000 (tag remoe).",
        files.len()
    );
    Ok(())
}

/// Files by their names in `folder`.
fn contents(args: &DashboardsArgs, folder: &Path) -> Result<Vec<(String, String)>, CliError> {
    let (scheme, target) = args
        .endpoint
        .trim_end_matches('/')
        .split_once("://")
        .filter(|(scheme, target)| matches!(*scheme, "http" | "https") && !target.is_empty())
        .ok_or_else(|| {
            let given = &args.endpoint;
            let message =
                format!("invalid --endpoint: expected a URL such as http://127.0.0.1:8000, got {given:?}");
            CliError::arguments("--endpoint", message)
        })?;
    let key = args.api_key_file.as_ref().map(std::path::absolute).transpose();
    let key = key.map_err(|error| CliError::arguments("--api-key-file", error.to_string()))?;
    let mut job = json!({"job_name": "remoe", "scheme": scheme, "static_configs": [{"targets": [target]}]});
    if let Some(key) = key {
        job["authorization"] = json!({"credentials_file": key});
    }
    let prometheus = json!({
        "global": {"scrape_interval": args.interval, "evaluation_interval": args.interval},
        "rule_files": ["rules/remoe.yaml"],
        "scrape_configs": [job],
    });
    let source = json!({"apiVersion": 1, "datasources": [
        {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": args.prometheus, "isDefault": true,
         "jsonData": {"timeInterval": args.interval}},
    ]});
    let provider = json!({"apiVersion": 1, "providers": [
        {"name": "remoe", "folder": "Remoe", "type": "file", "options": {"path": folder.join("grafana/dashboards")}},
    ]});
    let yaml = |value: &serde_json::Value| {
        serde_yaml::to_string(value).map_err(|error| CliError::runtime(format!("cannot write YAML: {error}")))
    };
    let provisioning = "grafana/provisioning";
    let mut files = vec![
        ("prometheus.yml".to_owned(), yaml(&prometheus)?),
        ("rules/remoe.yaml".to_owned(), RULES.to_owned()),
        (format!("{provisioning}/datasources/remoe.yaml"), yaml(&source)?),
        (format!("{provisioning}/dashboards/remoe.yaml"), yaml(&provider)?),
    ];
    files.extend(DASHBOARDS.map(|(name, text)| (format!("grafana/dashboards/{name}"), text.to_owned())));
    Ok(files)
}
