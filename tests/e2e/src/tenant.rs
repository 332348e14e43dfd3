//! Tenant of the release: an account with the role `edit` in one namespace, and an API key for the models there.

use crate::scene::Scene;
use crate::tool;
use remoe_test_support::deadline::{LONG, until};
use remoe_test_support::raw::{self, RawResponse};
use serde_json::Value;
use std::io::Write;
use std::net::SocketAddr;

/// Tenant with its access rights.
pub struct Tenant<'a> {
    /// Namespace of the tenant.
    pub scene: &'a Scene,
    /// API key of the tenant.
    pub key: &'static str,
}

impl<'a> Tenant<'a> {
    /// Gives the default account of the namespace of `scene` the role `edit` there.
    pub async fn new(scene: &'a Scene, key: &'static str) -> Self {
        let tenant = Self { scene, key };
        let account = format!("--serviceaccount={}:default", scene.namespace);
        scene.kubectl(&["create", "rolebinding", "tenant", "--clusterrole=edit", &account]).await;
        // A controller aggregates the chart's roles into this role.
        until(LONG, "rights on MoEDeployments", async || {
            tenant.kubectl(&["auth", "can-i", "create", "moedeployments.remoe.dev"]).await.ok()
        })
        .await;
        tenant
    }

    /// Returns the model name of the deployment `name` in requests.
    #[must_use]
    pub fn model(&self, name: &str) -> String {
        format!("{}/{name}", self.scene.namespace)
    }

    /// Runs `kubectl` with the account's rights, in its namespace by default.
    ///
    /// # Errors
    /// kubectl failed: its standard error.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        let account = format!("system:serviceaccount:{}:default", self.scene.namespace);
        let own = ["--as", &account, "--namespace", &self.scene.namespace];
        let cluster = &self.scene.cluster;
        tool::attempt(&cluster.tool("kubectl"), &cluster.kubeconfig, &[&own, arguments].concat()).await
    }

    /// Applies `object` in its namespace with the account's rights.
    ///
    /// # Errors
    /// kubectl failed: its standard error.
    pub async fn apply(&self, object: &Value) -> Result<String, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        file.write_all(object.to_string().as_bytes()).expect("a temporary file can be written");
        let path = file.path().to_str().expect("the path is text").to_owned();
        let namespace = object["metadata"]["namespace"].as_str().expect("the object names its namespace");
        let arguments = ["apply", "--server-side", "--force-conflicts", "--filename", &path];
        self.kubectl(&[&arguments[..], &["--namespace", namespace]].concat()).await
    }

    /// Sends `request` to `gateway` with the tenant's key.
    pub async fn ask(&self, gateway: SocketAddr, request: &str) -> RawResponse {
        raw::ask(gateway, with_key(request, self.key)).await
    }
}

/// Adds the header with `key` to a request.
#[must_use]
pub fn with_key(request: &str, key: &str) -> String {
    request.replacen("\r\n", &format!("\r\nAuthorization: Bearer {key}\r\n"), 1)
}
