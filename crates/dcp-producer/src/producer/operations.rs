//! Operations on a cluster, and faults that can be injected into it.

use std::sync::Arc;
use std::time::Duration;

use dcp_producer_proto::VBucketState;
use dcp_wire::{CollectionId, ScopeId, Seqno, Vbid};

use super::Producer;
use crate::Error;
use crate::bucket::{CollectionSettings, Copies, Manifest, Unchanged, VBucket};
use crate::cluster::ServedBucket;

/// How long the ports of a node may take to open or close.
const PORT_TIMEOUT: Duration = Duration::from_secs(10);

impl Producer {
    /// Nodes that belong to the cluster. Numbers of nodes that left are not reused, so this may be
    /// less than the highest number plus one.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.cluster.members().len()
    }

    /// Changes the password that clients authenticate with. Open connections stay open; new ones
    /// need the new password.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] or [`Error::DefaultPassword`] for an invalid password; the previous
    /// one stays.
    pub fn set_password(&self, password: &str) -> Result<(), Error> {
        self.servers.set_password(password)
    }

    /// Nodes of the copies of a vBucket, the active one's first.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`].
    pub fn copies_of(&self, vbid: Vbid) -> Result<Vec<usize>, Error> {
        if vbid.0 >= self.num_vbuckets() {
            return Err(self.no_vbucket(vbid));
        }
        Ok(self.cluster.first().bucket.nodes_of(vbid))
    }

    /// Moves a vBucket to another node, numbered from 0, as a rebalance does: its history
    /// continues, its streams end with "state changed" and clients get a new cluster map. If the
    /// node has a replica, that becomes the active copy, and the active copy becomes a replica.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`], [`Error::InvalidOption`] for a node that does not exist,
    /// [`Error::NotAMember`], [`Error::NodeDown`] for either node, [`Error::NodesCutOff`] or
    /// [`Error::TakeoverFailed`].
    pub fn move_vbucket(&self, vbid: Vbid, node: usize) -> Result<(), Error> {
        if vbid.0 >= self.num_vbuckets() {
            return Err(self.no_vbucket(vbid));
        }
        self.cluster.move_vbucket(&self.cluster.first(), vbid, node)
    }

    /// Takes a node out of the cluster; replicas of its active vBuckets are promoted.
    ///
    /// A hard failover (`graceful` is `false`) treats the node as dead: its connections are closed
    /// and it refuses new ones. Of each vBucket, the replica that has received the most
    /// ([`set_replica_lag`](Self::set_replica_lag)) is promoted and continues with that. Its history
    /// gets a new branch at the end of the last snapshot that it received and persisted completely,
    /// or at the start of an incomplete one ([`hold_persistence`](Self::hold_persistence)). A
    /// vBucket without a replica is lost until the next rebalance, which creates it again.
    ///
    /// A graceful failover first lets each replica catch up: histories continue, the node stays
    /// reachable, its streams end with "state changed". If a replica fails to take a vBucket over, or
    /// there is none, the node stays in the cluster, without the vBuckets that were taken over.
    ///
    /// To add the node back, use [`restart`](Self::restart) and [`rebalance`](Self::rebalance). Until
    /// then it stays out, even if the whole cluster is started again from its data folder.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node that does not exist, [`Error::NotAMember`],
    /// [`Error::LastNode`], or for a graceful failover [`Error::NodeDown`] if the node is not running,
    /// [`Error::NodesCutOff`] if a fault keeps two nodes from reaching each other,
    /// [`Error::NoRunningReplica`] and [`Error::TakeoverFailed`].
    pub fn failover(&self, node: usize, graceful: bool) -> Result<(), Error> {
        self.cluster.fail_over(node, graceful)?;
        self.store_all();
        Ok(())
    }

    /// Stores which nodes belong to the cluster, if there is a data folder.
    fn store_all(&self) {
        for served in self.cluster.buckets() {
            self.store(&served, []);
        }
    }

    /// Stores which nodes belong to the cluster and, of `vbids` of a bucket, what is persisted, if
    /// there is a data folder.
    fn store(&self, served: &Arc<ServedBucket>, vbids: impl IntoIterator<Item = Vbid>) {
        if let Some(store) = &self.store
            && let Err(error) = store.round(&self.cluster, served, vbids)
        {
            tracing::error!(name: "data_folder_not_written", %error, "changes could not be written to the data folder");
        }
    }

    /// Takes a majority of nodes out of the cluster, as in an unsafe failover. Like hard failovers
    /// of each; in addition, the cluster map begins a new epoch and its revision starts over.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node that does not exist, [`Error::NotAMember`], or
    /// [`Error::LastNode`] if none would be left.
    pub fn failover_unsafely(&self, nodes: &[usize]) -> Result<(), Error> {
        self.cluster.fail_over_unsafely(nodes)?;
        self.store_all();
        Ok(())
    }

    /// Version of the cluster map: its epoch and its revision. Every change increases the pair.
    #[must_use]
    pub fn map_version(&self) -> (i64, i64) {
        let version = self.cluster.first().map().version;
        (version.epoch, version.rev)
    }

    /// Stops a node at once, like a crash: connections are closed, new ones refused, unpersisted
    /// changes are lost. The cluster map does not change.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node that does not exist.
    pub fn kill(&self, node: usize) -> Result<(), Error> {
        self.cluster.kill(node)
    }

    /// Stops a node, unless it is already stopped, and starts it again.
    ///
    /// A clean restart persists everything first, and histories continue. After an unclean one, and
    /// always after [`kill`](Self::kill), the node has only what was persisted: seqnos above that
    /// are reused, and active vBuckets begin a new history branch there. Replicas on other nodes
    /// roll back with them. An ephemeral bucket loses everything either way.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node that does not exist, or [`Error::NodeDown`] if its ports
    /// cannot be opened again.
    pub async fn restart(&self, node: usize, clean: bool) -> Result<(), Error> {
        let power = self.cluster.known_power(node)?;
        let cleanly = clean && power.is_on();
        self.cluster.kill(node)?;
        let turn = async {
            power.ports_closed().await;
            self.cluster.come_back(node, cleanly);
            power.switch_on();
            power.ports_open().await;
        };
        tokio::time::timeout(PORT_TIMEOUT, turn).await.map_err(|_| Error::NodeDown { node })
    }

    /// Adds a node and returns its number. It has no vBuckets before the next
    /// [`rebalance`](Self::rebalance).
    ///
    /// # Errors
    /// [`Error::Listen`] if a port cannot be opened.
    pub async fn add_node(&self) -> Result<usize, Error> {
        let listeners = self.servers.bind().await?;
        let node = self.cluster.add_node(listeners.addresses)?;
        self.servers.serve(node, listeners);
        Ok(node)
    }

    /// Distributes the vBuckets and their replicas evenly over the running nodes, including those
    /// that were failed over and restarted; one vBucket at a time, each with a new cluster map.
    /// Histories continue; streams of moved vBuckets end with "state changed".
    ///
    /// # Errors
    /// [`Error::NodeDown`] if a node of the cluster is not running, [`Error::NodesCutOff`], or
    /// [`Error::TakeoverFailed`], after which vBuckets that were moved already stay in their new place.
    pub fn rebalance(&self) -> Result<(), Error> {
        self.cluster.rebalance()?;
        self.store_all();
        Ok(())
    }

    /// Sets how many changes a replica of a vBucket leaves unapplied, `None` for all future ones:
    /// they are lost if the active copy's node fails. Replicas are numbered from 1, in the order of
    /// the cluster map. Default 0.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::UnknownReplica`].
    pub fn set_replica_lag(
        &self,
        vbid: Vbid,
        replica: usize,
        lag: Option<u64>,
    ) -> Result<(), Error> {
        if vbid.0 >= self.num_vbuckets() {
            return Err(self.no_vbucket(vbid));
        }
        let unknown = Error::UnknownReplica { vbid, replica };
        if replica == 0 {
            return Err(unknown);
        }
        self.cluster.first().set_replica_lag(vbid, replica, lag).ok_or(unknown)
    }

    /// Holds the persistence of one copy of a vBucket, or resumes it: copy 0 is the active one, 1
    /// the first replica.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::UnknownReplica`].
    pub fn hold_persistence(&self, vbid: Vbid, copy: usize, hold: bool) -> Result<(), Error> {
        let set = |copies: &mut Copies| {
            let vbucket = &mut copies.get_mut(copy)?.vbucket;
            vbucket.hold_persistence(hold);
            Some(())
        };
        let known = self.cluster.first().bucket.rearrange(vbid, set);
        let known = known.ok_or_else(|| self.no_vbucket(vbid))?;
        known.ok_or(Error::UnknownReplica { vbid, replica: copy })
    }

    /// Expires every document of every bucket whose time has passed; returns how many. Otherwise that
    /// happens when one is next accessed.
    pub fn expire_due(&self) -> usize {
        let expire = |served: &Arc<ServedBucket>| {
            let bucket = &served.bucket;
            let expire = |vbid| bucket.with(vbid, |vbucket| vbucket.expire_due(self.now()));
            bucket.vbids().filter_map(expire).sum::<usize>()
        };
        self.cluster.buckets().iter().map(expire).sum()
    }

    /// Persists everything and evicts it from memory: a stream that starts from 0 is then read from
    /// disk. Otherwise changes are persisted after a short while, and recent ones are kept in
    /// memory as well.
    pub fn persist(&self) {
        for served in self.cluster.buckets() {
            let bucket = &served.bucket;
            for vbid in bucket.vbids() {
                bucket.each_copy(vbid, |vbucket| {
                    vbucket.persist_and_evict();
                    true
                });
                bucket.changes().announce(vbid);
            }
            self.store(&served, bucket.vbids());
        }
    }

    /// Persists everything, then purges the tombstones of a vBucket up to seqno `to`; its last
    /// change is always kept.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`].
    pub fn purge(&self, vbid: Vbid, to: Seqno) -> Result<(), Error> {
        self.purge_copies(vbid, |vbucket| vbucket.purge(to))
    }

    /// Like [`purge`](Self::purge), on disk only: recent changes stay in memory, including
    /// tombstones. Used to replay recordings of servers.
    ///
    /// # Errors
    /// As [`purge`](Self::purge).
    #[doc(hidden)]
    pub fn compact(&self, vbid: Vbid, to: Seqno) -> Result<(), Error> {
        self.purge_copies(vbid, |vbucket| vbucket.compact(to))
    }

    fn purge_copies(&self, vbid: Vbid, purge: impl Fn(&mut VBucket)) -> Result<(), Error> {
        let purge = |vbucket: &mut VBucket| {
            purge(vbucket);
            true
        };
        let purged = self.cluster.first().bucket.each_copy(vbid, purge);
        purged.then_some(()).ok_or_else(|| self.no_vbucket(vbid))
    }

    /// Rolls a vBucket back to its state at seqno `to`, like a failover to a replica that had
    /// received no more: changes above it are lost, a new history branch begins there, and streams
    /// of the vBucket end with "state changed".
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`], [`Error::RollbackBeyondHighSeqno`], or
    /// [`Error::RollbackHistoryGone`] if overwritten documents that are needed are no longer kept.
    pub fn roll_back(&self, vbid: Vbid, to: Seqno) -> Result<(), Error> {
        let first = self.cluster.first();
        first.bucket.roll_back(vbid, to).ok_or_else(|| self.no_vbucket(vbid))??;
        first.apply_manifest(self.cluster.dcp_config().server_version);
        Ok(())
    }

    /// Changes the state of the active copy of a vBucket, as a cluster manager does during a move:
    /// its streams end with "state changed", and it accepts writes only while it is active. This
    /// also makes it active again after a client took it over. A replica that becomes active begins
    /// a new history branch, where it has persisted all of its history.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::VbucketUnavailable`].
    pub fn set_vbucket_state(&self, vbid: Vbid, state: VBucketState) -> Result<(), Error> {
        let vbuuid = self.cluster.chance().vbuuid();
        // Servers before 7.0 continue with the checkpoint they had as a replica.
        let keeps_checkpoint = self.cluster.dcp_config().server_version.is_legacy();
        let set = |copies: &mut Copies| copies.set_state(state, vbuuid, keeps_checkpoint);
        let set = self.cluster.first().bucket.rearrange(vbid, set);
        if set == Some(true) { Ok(()) } else { Err(self.no_vbucket(vbid)) }
    }

    /// Drops the bucket: connections to it are closed without further messages, and selecting it
    /// fails.
    ///
    /// # Errors
    /// [`Error::NoBucket`].
    pub fn drop_bucket(&self) -> Result<(), Error> {
        self.cluster.drop_bucket(&self.cluster.first())
    }

    /// Creates the bucket again, empty and with another identity.
    ///
    /// # Errors
    /// [`Error::BucketExists`].
    pub fn create_bucket(&self) -> Result<(), Error> {
        self.cluster.create_bucket(self.cluster.default_settings())
    }

    /// Removes every document of the bucket at once, as a flush does: its vBuckets start over with
    /// new histories, their streams end with "state changed". Scopes and collections stay.
    ///
    /// # Errors
    /// [`Error::NoBucket`].
    pub fn flush_bucket(&self) -> Result<(), Error> {
        self.cluster.flush_bucket(&self.cluster.first())
    }

    fn update_manifest<T>(
        &self,
        op: impl FnOnce(&mut Manifest) -> Result<T, Unchanged>,
    ) -> Result<T, Error> {
        self.cluster.update_manifest(&self.cluster.first(), self.now(), op)
    }

    /// Creates a scope; `_system` too, which servers since 7.6 have from the start.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it exists or the name is not allowed; [`Error::NoBucket`].
    pub fn create_scope(&self, scope: &str) -> Result<ScopeId, Error> {
        self.update_manifest(|manifest| manifest.create_scope(scope))
    }

    /// Creates a collection. With `max_ttl`, its documents expire after at most that many seconds.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it exists, the name is not allowed, or there is no such scope;
    /// [`Error::NoBucket`].
    pub fn create_collection(
        &self,
        scope: &str,
        collection: &str,
        max_ttl: Option<u32>,
    ) -> Result<CollectionId, Error> {
        self.update_manifest(|manifest| {
            let settings = CollectionSettings { max_ttl, history: false };
            manifest.create_collection(scope, collection, settings)
        })
    }

    /// Changes the maximum expiry of a collection's documents in seconds, `None` for no limit, and
    /// whether the collection keeps every version of its documents. Existing documents keep their
    /// expiry.
    ///
    /// Only clients with FlatBuffers events get an event for it; others only see its seqno. Has no
    /// effect if the collection already has these settings.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is no such collection; [`Error::NoBucket`].
    pub fn modify_collection(
        &self,
        scope: &str,
        collection: &str,
        max_ttl: Option<u32>,
        history: bool,
    ) -> Result<(), Error> {
        self.update_manifest(|manifest| {
            let settings = CollectionSettings { max_ttl, history };
            manifest.modify_collection(scope, collection, settings)
        })
    }

    /// Empties a collection at once: its documents are removed without tombstones, and clients get
    /// an event that it is created again, with the same id.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is no such collection; [`Error::NoBucket`].
    pub fn flush_collection(&self, scope: &str, collection: &str) -> Result<(), Error> {
        self.update_manifest(|manifest| manifest.flush_collection(scope, collection))
    }

    /// Drops a scope with everything in it.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is none, or it is the default scope; [`Error::NoBucket`].
    pub fn drop_scope(&self, scope: &str) -> Result<(), Error> {
        self.update_manifest(|manifest| manifest.drop_scope(scope))
    }

    /// Drops a collection with everything in it; the default collection cannot be created again.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is none; [`Error::NoBucket`].
    pub fn drop_collection(&self, scope: &str, collection: &str) -> Result<(), Error> {
        self.update_manifest(|manifest| manifest.drop_collection(scope, collection))
    }

    /// The id of a collection.
    ///
    /// # Errors
    /// [`Error::UnknownCollection`].
    pub fn collection_id(&self, scope: &str, collection: &str) -> Result<CollectionId, Error> {
        let manifest = self.cluster.first().manifest();
        let found = manifest
            .scope_named(scope.as_bytes())
            .and_then(|scope| scope.collection_named(collection.as_bytes()));
        found.map(|collection| collection.id).ok_or_else(|| Error::UnknownCollection {
            scope: scope.to_owned(),
            collection: collection.to_owned(),
        })
    }

    /// Sets the collections manifest from `stored`, in the format of a data folder, with the ids in
    /// it. Used to replay recordings of servers.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it is not a manifest; [`Error::NoBucket`].
    #[doc(hidden)]
    pub fn set_manifest(&self, stored: &str) -> Result<(), Error> {
        let stored = serde_json::from_str(stored).unwrap_or_default();
        let set = Manifest::from_stored(&stored).ok_or(Error::Manifest("it is not a manifest"))?;
        self.update_manifest(|manifest| {
            *manifest = set;
            Ok(())
        })
    }

    /// The collections manifest as sent to clients, in JSON.
    #[must_use]
    pub fn manifest_json(&self) -> String {
        self.cluster.first().manifest().to_json()
    }
}
