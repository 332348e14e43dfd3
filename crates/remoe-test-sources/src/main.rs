//! Serves a model's folder as the hub, S3 and a web server do, until it is interrupted.

use clap::Parser;
use remoe_test_sources::{Content, Hub, HubOptions, S3, S3Options, Web};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Serves a model's folder as the hub, S3 and a web server do.
#[derive(Debug, Parser)]
struct ServeArgs {
    /// The folder.
    folder: PathBuf,
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port of the web server; S3 and the hub take the next ones, 0 any free ones.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The token that the hub demands.
    #[arg(long)]
    token: Option<String>,
    /// Bytes per second of one answer.
    #[arg(long)]
    bytes_per_second: Option<u64>,
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let settings = ServeArgs::parse();
    let content = Content::new(settings.folder);
    content.change(|faults| faults.bytes_per_second = settings.bytes_per_second);
    let address = |number: u16| {
        let port = if settings.port == 0 { 0 } else { settings.port.saturating_add(number) };
        SocketAddr::new(settings.host, port)
    };
    let web = Web::start(address(0), content.clone()).await?;
    let s3 = S3::start(address(1), content.clone(), S3Options::default()).await?;
    let options = HubOptions { token: settings.token, ..HubOptions::default() };
    let hub = Hub::start(address(2), content, options).await?;
    let mut out = io::stdout().lock();
    writeln!(out, "--model {}", web.model())?;
    for (name, value) in s3.environment() {
        write!(out, "{name}={value} ")?;
    }
    writeln!(out, "--model '{}'", s3.model())?;
    writeln!(out, "HF_ENDPOINT={} --model {}", hub.endpoint(), hub.model())?;
    drop(out);
    std::future::pending::<()>().await;
    Ok(())
}
