//! `remoe dashboards`: writes a configuration of Prometheus and Grafana for a gateway.

use crate::exit::CliError;
use crate::output::json;
use axum::http::Uri;
use axum::http::uri::{Authority, Scheme};
use clap::Args;
use remoe_process::parse_duration;
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct DashboardsArgs {
    /// Folder to write to
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// URL of the gateway; metrics are read at /metrics below its path
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) endpoint: String,
    /// File with the API key, if the gateway needs one
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// URL of Prometheus for Grafana
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    pub(crate) prometheus: String,
    /// Scrape interval of Prometheus, such as 15s
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = scrape_interval)]
    pub(crate) interval: Duration,
}

/// Grafana dashboards, which the Helm chart contains too.
const DASHBOARDS: [(&str, &str); 4] = [
    ("cost.json", include_str!("../../../charts/remoe/files/dashboards/cost.json")),
    ("serving.json", include_str!("../../../charts/remoe/files/dashboards/serving.json")),
    ("plan.json", include_str!("../../../charts/remoe/files/dashboards/plan.json")),
    ("health.json", include_str!("../../../charts/remoe/files/dashboards/health.json")),
];
const RULES: &str = include_str!("../../../charts/remoe/files/rules/remoe.yaml");

#[derive(Serialize)]
struct DashboardFiles {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

/// Writes the files, and prints how to start Prometheus and Grafana with them.
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
        return Ok(json::print(&DashboardFiles { folder, files })?);
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

/// Returns the files with their paths below `folder`.
fn contents(args: &DashboardsArgs, folder: &Path) -> Result<Vec<(String, String)>, CliError> {
    let endpoint = ScrapeTarget::of(&args.endpoint)?;
    http_url("--prometheus", &args.prometheus)?;
    let key = args.api_key_file.as_ref().map(std::path::absolute).transpose();
    let key = key.map_err(|error| CliError::arguments("--api-key-file", error.to_string()))?;
    let ScrapeTarget { scheme, target, metrics_path } = &endpoint;
    let mut job = json!({
        "job_name": "remoe", "scheme": scheme, "metrics_path": metrics_path, "static_configs": [{"targets": [target]}],
    });
    if let Some(key) = key {
        job["authorization"] = json!({"credentials_file": utf8("--api-key-file", &key)?});
    }
    let interval = format_interval(args.interval);
    let shown = utf8("DIR", folder)?;
    let prometheus = json!({
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": ["rules/remoe.yaml"],
        "scrape_configs": [job],
    });
    let source = json!({"apiVersion": 1, "datasources": [
        {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": args.prometheus, "isDefault": true,
         "jsonData": {"timeInterval": interval}},
    ]});
    let provider = json!({"apiVersion": 1, "providers": [
        {"name": "remoe", "folder": "Remoe", "type": "file", "options": {"path": format!("{shown}/grafana/dashboards")}},
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

/// Scrape target of Prometheus, which takes the parts of a URL separately.
struct ScrapeTarget {
    scheme: &'static str,
    /// Host and port, as `host:port`.
    target: String,
    metrics_path: String,
}

impl ScrapeTarget {
    /// Converts the URL of a gateway, whose metrics are at `/metrics` below its path.
    fn of(endpoint: &str) -> Result<Self, CliError> {
        let (scheme, authority, path) = http_url("--endpoint", endpoint)?;
        let (scheme, port) = if scheme == Scheme::HTTPS { ("https", 443) } else { ("http", 80) };
        let target = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(port));
        let path = path.trim_end_matches('/');
        let metrics_path =
            if path.ends_with("/metrics") { path.to_owned() } else { format!("{path}/metrics") };
        Ok(Self { scheme, target, metrics_path })
    }
}

/// Parses the URL of an HTTP server into its scheme, its host with a port, and its path.
fn http_url(flag: &str, url: &str) -> Result<(Scheme, Authority, String), CliError> {
    let wrong = |expected: &str| {
        CliError::arguments(
            flag,
            format!("invalid {flag} {url:?}: expected {expected}, such as http://127.0.0.1:8000"),
        )
    };
    let parts = url.parse::<Uri>().map_err(|error| wrong(&format!("a URL ({error})")))?.into_parts();
    let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
        return Err(wrong("a URL with http:// or https:// and a host"));
    };
    if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
        return Err(wrong("http:// or https://"));
    }
    if authority.as_str().contains('@') {
        return Err(wrong("a URL without user and password"));
    }
    let port_text = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    let has_port = authority.port_u16().is_some_and(|port| port > 0);
    if authority.host().is_empty() || !(port_text.is_empty() || has_port) {
        return Err(wrong("a host and a port from 1 to 65535"));
    }
    let path = parts.path_and_query;
    if url.contains('#') || path.as_ref().is_some_and(|path| path.query().is_some()) {
        return Err(wrong("a URL without query and fragment"));
    }
    Ok((scheme, authority, path.map_or_else(String::new, |path| path.path().to_owned())))
}

/// Parses a scrape interval, in whole milliseconds as Prometheus requires.
pub(crate) fn scrape_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text).map_err(|error| error.to_string())?;
    if interval.subsec_nanos() % 1_000_000 != 0 {
        return Err(format!("invalid duration {text:?}: expected a whole number of milliseconds"));
    }
    Ok(interval)
}

/// Formats `interval` as a whole number of one unit, which both Prometheus and Grafana accept.
fn format_interval(interval: Duration) -> String {
    match interval.subsec_millis() {
        0 => format!("{}s", interval.as_secs()),
        _ => format!("{}ms", interval.as_millis()),
    }
}

fn utf8<'a>(field: &str, path: &'a Path) -> Result<&'a str, CliError> {
    let wrong = || format!("invalid {field} {}: expected a path in UTF-8", path.display());
    path.to_str().ok_or_else(|| CliError::arguments(field, wrong()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;
    use std::process;

    /// Runs the command with these arguments, and returns its folder and `prometheus.yml`.
    fn written(arguments: &[&str]) -> Result<(tempfile::TempDir, serde_json::Value), String> {
        let folder = tempfile::tempdir().unwrap();
        let line = [&["remoe", "dashboards", folder.path().to_str().unwrap()], arguments].concat();
        let command = Cli::try_parse_from(line).map_err(|error| error.to_string())?.command;
        let Command::Dashboards(args) = command else { return Err(format!("{command:?}")) };
        run(&args, true).map_err(|error| error.message)?;
        let text = std::fs::read_to_string(folder.path().join("prometheus.yml")).unwrap();
        Ok((folder, serde_yaml::from_str(&text).unwrap()))
    }

    #[test]
    fn endpoint_becomes_scheme_target_and_path() {
        for (endpoint, scheme, target, path) in [
            ("http://127.0.0.1:8000", "http", "127.0.0.1:8000", "/metrics"),
            ("http://127.0.0.1:8000/", "http", "127.0.0.1:8000", "/metrics"),
            ("https://x/pre", "https", "x:443", "/pre/metrics"),
            ("HTTP://x/a/b//", "http", "x:80", "/a/b/metrics"),
            ("http://[::1]:9/metrics", "http", "[::1]:9", "/metrics"),
        ] {
            let (_folder, file) = written(&["--endpoint", endpoint]).unwrap();
            let job = &file["scrape_configs"][0];
            assert_eq!((&job["scheme"], &job["metrics_path"]), (&json!(scheme), &json!(path)), "{endpoint}");
            assert_eq!(job["static_configs"], json!([{"targets": [target]}]), "{endpoint}");
        }
    }

    #[test]
    fn interval_is_formatted_for_prometheus() {
        for (given, shown) in
            [("15s", "15s"), ("5s", "5s"), ("1.5s", "1500ms"), ("1m30s", "90s"), ("1h", "3600s")]
        {
            let (_folder, file) = written(&["--interval", given]).unwrap();
            let global = json!({"scrape_interval": shown, "evaluation_interval": shown});
            assert_eq!(file["global"], global, "{given}");
        }
    }

    #[test]
    fn invalid_arguments_are_refused_by_name() {
        for (flag, value, reason) in [
            ("--interval", "5", "write 5ms, 5s, 5m or 5h"),
            ("--interval", "soon", "expected numbers with units"),
            ("--interval", "0s", "invalid duration"),
            ("--interval", "10us", "whole number of milliseconds"),
            ("--endpoint", "127.0.0.1:8000", "http:// or https://"),
            ("--endpoint", "ftp://x", "http:// or https://"),
            ("--endpoint", "/x", "http:// or https://"),
            ("--endpoint", "http://", "expected"),
            ("--endpoint", "http://a b", "expected a URL"),
            ("--endpoint", "http://x:99999", "a port from 1 to 65535"),
            ("--endpoint", "http://x:0", "a port from 1 to 65535"),
            ("--endpoint", "http://x:", "a port from 1 to 65535"),
            ("--endpoint", "http://me:secret@x", "without user and password"),
            ("--endpoint", "http://x/?a=b", "without query"),
            ("--endpoint", "http://x/#a", "without query and fragment"),
            ("--prometheus", "9090", "http:// or https://"),
        ] {
            let error = written(&[flag, value]).map(|_| ()).unwrap_err();
            assert!(error.contains(flag) && error.contains(value) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn promtool_accepts_written_files() {
        let key = tempfile::NamedTempFile::new().unwrap();
        for arguments in [
            &[][..],
            &["--interval", "1.5s", "--endpoint", "https://x/pre", "--prometheus", "http://y:1/sub"],
            &[
                "--interval",
                "1m30s",
                "--endpoint",
                "http://[::1]:9/",
                "--api-key-file",
                key.path().to_str().unwrap(),
            ],
            &["--interval", "1ms"],
        ] {
            let (folder, _) = written(arguments).unwrap();
            let config = folder.path().join("prometheus.yml");
            match process::Command::new("promtool").args(["check", "config"]).arg(config).output() {
                Ok(output) => assert!(output.status.success(), "{arguments:?}: {output:?}"),
                Err(error) => eprintln!("promtool did not check the files: {error}"),
            }
        }
    }
}
