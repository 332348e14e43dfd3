//! A namespace per test.

use crate::cluster::Cluster;
use kube::api::Api;

/// A cluster and the namespace that a test has in it.
#[derive(Clone)]
pub struct Scene {
    /// The cluster.
    pub cluster: Cluster,
    /// Namespace of this test alone.
    pub namespace: String,
}

impl Scene {
    /// Objects of the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    /// Runs `kubectl` in the namespace and returns what it prints.
    pub async fn kubectl(&self, arguments: &[&str]) -> String {
        self.cluster.kubectl(&[&["--namespace", &self.namespace], arguments].concat()).await
    }
}
