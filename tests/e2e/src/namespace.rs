//! Namespaces of tests, from creation to removal.

use crate::cluster::Cluster;
use crate::scene::Scene;
use crate::{claim, figures, report};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams};
use remoe_test_support::deadline::{LONG, SOON, until, within};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Deadline of a whole test, with start, load and end of pods.
const TEST_LIMIT: Duration = Duration::from_secs(600);
/// Variable that keeps the namespace of a failed test.
const KEEP: &str = "REMOE_E2E_KEEP";

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Scene {
    /// Runs `body` in a new namespace, in which pods must meet the restricted profile. If it panics, prints the
    /// namespace's state first. Deletes the namespace in any case.
    pub async fn run(test: &str, body: impl AsyncFnOnce(&Scene)) {
        let Some(cluster) = Cluster::find(test).await else {
            return;
        };
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let scene = Self { cluster, namespace: format!("e2e-{}-{count}", process::id()) };
        scene.create().await;
        let body = AssertUnwindSafe(within(TEST_LIMIT, test, body(&scene)));
        let Err(panic) = body.catch_unwind().await else {
            return scene.delete().await;
        };
        eprintln!("--- {test} failed in namespace {}", scene.namespace);
        report::print(&scene).await;
        if std::env::var_os(KEEP).is_none() {
            scene.delete().await;
        }
        resume_unwind(panic)
    }

    async fn create(&self) {
        let labels = [("pod-security.kubernetes.io/enforce".to_owned(), "restricted".to_owned())];
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(self.namespace.clone()),
                labels: Some(labels.into()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let created = self.namespaces().create(&PostParams::default(), &namespace).await;
        created.unwrap_or_else(|error| panic!("namespace {}: {error}", self.namespace));
        // No pod can be created before it exists.
        let accounts = self.api::<ServiceAccount>();
        until(SOON, "the default service account", async || accounts.get_opt("default").await.ok().flatten())
            .await;
        figures::create(self).await;
    }

    async fn delete(&self) {
        let namespaces = self.namespaces();
        let deleted = namespaces.delete(&self.namespace, &DeleteParams::default()).await;
        deleted.unwrap_or_else(|error| panic!("namespace {}: {error}", self.namespace));
        let what = format!("the end of namespace {}", self.namespace);
        until(LONG, &what, async || {
            matches!(namespaces.get_opt(&self.namespace).await, Ok(None)).then_some(())
        })
        .await;
        claim::remove_volumes(self).await;
    }

    fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.cluster.client.clone())
    }
}
