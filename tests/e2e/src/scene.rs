//! A namespace per test.

use crate::cluster::Cluster;
use kube::api::Api;

/// Cluster with the namespace of one test.
#[derive(Clone)]
pub struct Scene {
    /// Cluster under test.
    pub cluster: Cluster,
    /// Namespace of this test alone.
    pub namespace: String,
}

impl Scene {
    /// Returns the API of objects in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    /// Runs `kubectl` in the namespace and returns its output.
    pub async fn kubectl(&self, arguments: &[&str]) -> String {
        self.cluster.kubectl(&[&["--namespace", &self.namespace], arguments].concat()).await
    }
}
