//! Generations of a plan with groups, as an operator on a real API server pushes them to main functions.

use crate::facts::subject;
use crate::manifests::plan_object;
use crate::names::{FUNCTION, REPLICA};
use crate::ports::CONTROL_PORT;
use crate::testing::example::{deployment, facts, plan_of_groups};
use crate::tests::api_server::stage::{Budget, Operator, POLL_INTERVAL};
use crate::tests::api_server::{Server, eventually, with_server};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use remoe_api::{MoEDeployment, MoEPlan, MoERecord};
use remoe_planner::PlanAccount;
use remoe_proto::placement_digest;
use remoe_proto::v1::main_model_server::{MainModel, MainModelServer};
use remoe_proto::v1::{
    DescribeMainRequest, EndpointWork, GenerateEvent, GenerateRequest, InspectReply, InspectRequest,
    MainDescription, Routing, RoutingAck,
};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Main function that accepts and records generations.
#[derive(Clone, Default)]
pub struct RecordingMain {
    received: Arc<Mutex<Vec<Routing>>>,
    /// Description that it returns instead of the true one.
    description: Option<Arc<MainDescription>>,
}

impl RecordingMain {
    /// Starts replica `replica` at its test address.
    async fn start(replica: u32) -> Self {
        Self::at(&address(0, replica)).await
    }

    /// Starts a main function at `ip`.
    pub async fn at(ip: &str) -> Self {
        Self::default().listen(ip).await
    }

    /// Starts a main function at `ip` that always returns this description.
    pub async fn describing(ip: &str, description: MainDescription) -> Self {
        Self { description: Some(Arc::new(description)), ..Self::default() }.listen(ip).await
    }

    async fn listen(self, ip: &str) -> Self {
        let main = self;
        let listener = TcpListener::bind((ip, CONTROL_PORT)).await.unwrap();
        let service = MainModelServer::new(main.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        main
    }

    pub fn received(&self) -> Vec<Routing> {
        self.received.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl MainModel for RecordingMain {
    type GenerateStream = tokio_stream::Empty<Result<GenerateEvent, Status>>;

    async fn set_routing(&self, request: Request<Routing>) -> Result<Response<RoutingAck>, Status> {
        let routing = request.into_inner();
        let (generation, placement) = (routing.generation, placement_digest(&routing));
        self.received.lock().unwrap().push(routing);
        Ok(Response::new(RoutingAck { generation, placement, problems: Vec::new() }))
    }

    async fn describe(
        &self,
        _request: Request<DescribeMainRequest>,
    ) -> Result<Response<MainDescription>, Status> {
        if let Some(description) = &self.description {
            return Ok(Response::new(MainDescription::clone(description)));
        }
        let received = self.received();
        let (generation, placement) = received
            .last()
            .map(|routing| (routing.generation, placement_digest(routing)))
            .unwrap_or_default();
        Ok(Response::new(MainDescription {
            generation,
            placement,
            age_us: 9_000_000,
            work: vec![EndpointWork { address: "10.0.0.9:9001".to_owned(), computed_us: 1_500_000 }],
            ..MainDescription::default()
        }))
    }

    async fn generate(
        &self,
        _request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        Err(Status::unimplemented("it only listens"))
    }

    async fn inspect(&self, _request: Request<InspectRequest>) -> Result<Response<InspectReply>, Status> {
        Err(Status::unimplemented("it only listens"))
    }
}

/// Addresses that no other test uses.
fn address(part: u32, replica: u32) -> String {
    format!("127.77.{part}.{}", replica + 1)
}

async fn pods(server: &Server) -> Vec<Pod> {
    let selector = ListParams::default().labels(FUNCTION);
    let pods = server.api::<Pod>().list(&selector).await.unwrap();
    pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
}

/// Marks every pod as running, and as ready if nothing is missing.
async fn run(server: &Server, mains: &[RecordingMain]) {
    for pod in pods(server).await {
        let replica: usize = pod.labels()[REPLICA].parse().unwrap();
        let part = match pod.labels()[FUNCTION].strip_prefix('g') {
            Some(group) => group.parse::<u32>().unwrap() + 1,
            None => 0,
        };
        let ready = part > 0 || !mains[replica].received().is_empty();
        let status = if ready { "True" } else { "False" };
        let is_so = pod.status.as_ref().and_then(|status| status.conditions.as_ref()).is_some_and(|all| {
            all.iter().any(|condition| condition.type_ == "Ready" && condition.status == status)
        });
        if is_so {
            continue;
        }
        let now = jiff::Timestamp::now().to_string();
        let ip = address(part, u32::try_from(replica).unwrap());
        let status = json!({"status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "startTime": now,
            "conditions": [{"type": "Ready", "status": status, "lastTransitionTime": now}],
        }});
        let params = PatchParams::default();
        server.api::<Pod>().patch_status(&pod.name_any(), &params, &Patch::Merge(&status)).await.unwrap();
    }
}

fn uids(pods: &[Pod]) -> BTreeSet<String> {
    pods.iter().filter_map(ResourceExt::uid).collect()
}

/// Creates the demo deployment with a plan of two groups, which is found by its inputs.
async fn deploy(server: &Server) -> MoEPlan {
    let cpu = json!({"min": 250, "max": 4000, "step": 250});
    let mut owner = deployment(json!({"main": {"cpu": cpu}, "remoteExperts": {"cpu": cpu}}));
    owner.metadata = ObjectMeta { name: Some("demo".to_owned()), ..ObjectMeta::default() };
    let owner = server.api::<MoEDeployment>().create(&PostParams::default(), &owner).await.unwrap();
    let record = facts().record(&owner, &subject(&owner.spec.model, None).unwrap()).unwrap();
    server.api::<MoERecord>().create(&PostParams::default(), &record).await.unwrap();
    let (_, plan) = plan_object(&owner, plan_of_groups(&owner, 2)).unwrap();
    server.api::<MoEPlan>().create(&PostParams::default(), &plan).await.unwrap()
}

#[test]
fn groups_and_account_are_pushed_once_and_after_restart() {
    with_server(async |server| {
        let plan = deploy(&server).await;
        let mains = [RecordingMain::start(0).await, RecordingMain::start(1).await];
        let operator = Operator::start_with(&server, Budget::unlimited(), &["--signer", "none"]).await;
        let settled = async |replicas: usize| {
            eventually("a settled deployment", async || {
                run(&server, &mains).await;
                sleep(POLL_INTERVAL).await;
                let status = server.api::<MoEDeployment>().get("demo").await.unwrap().status;
                let functions = status.and_then(|status| status.functions);
                functions == Some(format!("{0}/{0}", replicas + 3))
                    && mains.iter().take(replicas).all(|main| !main.received().is_empty())
            })
            .await;
        };
        settled(1).await;
        let before = pods(&server).await;
        let functions: Vec<&String> = before.iter().map(|pod| &pod.labels()[FUNCTION]).collect();
        assert_eq!(functions.iter().filter(|name| **name == "g1").count(), 2, "{functions:?}");
        let first = mains[0].received();
        let groups: Vec<_> = plan.spec.groups.iter().map(|group| group.experts().unwrap()).collect();
        let hosted: Vec<_> = first[0].endpoints.iter().map(|endpoint| endpoint.experts.clone()).collect();
        assert_eq!(hosted, [groups[0].clone(), groups[1].clone(), groups[1].clone()]);
        assert!(PlanAccount::from_json(&first[0].account).is_ok(), "{}", first[0].account);

        // One more main function gets the same generation; the first one gets nothing new.
        let scale = json!({"spec": {"replicas": 2}});
        let api = server.api::<MoEDeployment>();
        api.patch_scale("demo", &PatchParams::default(), &Patch::Merge(&scale)).await.unwrap();
        settled(2).await;
        assert_eq!((mains[0].received(), mains[1].received()), (first.clone(), first.clone()));
        assert!(uids(&pods(&server).await).is_superset(&uids(&before)));
        let plans = server.api::<MoEPlan>().list(&ListParams::default()).await.unwrap();
        assert_eq!(plans.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), [plan.name_any()]);

        // After a restart of operator and main function, the same generation is pushed again.
        operator.kill().await;
        mains[0].received.lock().unwrap().clear();
        let operator = Operator::start_with(&server, Budget::unlimited(), &["--signer", "none"]).await;
        settled(2).await;
        assert_eq!((mains[0].received(), mains[1].received()), (first.clone(), first));
        operator.kill().await;
    });
}
