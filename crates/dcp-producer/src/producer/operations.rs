//! What an operator does to a cluster, and the faults that can be injected into it.

use std::time::Duration;

use dcp_proto::producer::{Privilege, VBucketState};
use dcp_wire::{CollectionId, ScopeId, Seqno, Vbid};

use super::Producer;
use crate::Error;
use crate::bucket::{CollectionSettings, Copies, Manifest, VBucket};

/// How long the ports of a node may take to open or close.
const PORT_PATIENCE: Duration = Duration::from_secs(10);

impl Producer {
    /// Nodes that belong to the cluster. Numbers of nodes that left are not given again, so this
    /// may be less than the highest number plus one.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.cluster.members().len()
    }

    /// Changes the password that clients authenticate with. Connections that are open stay open;
    /// whoever connects from now on needs the new one.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] or [`Error::DefaultPassword`] for one that a cluster cannot be
    /// started with; the former one stays.
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
        Ok(self.cluster.bucket.rearrange(vbid, |copies| copies.nodes()).unwrap_or_default())
    }

    /// Moves a vBucket to another node, numbered from 0, as a finished rebalance does: its history
    /// goes on, its streams end with "state changed" and clients get a new cluster map. A replica
    /// the node had becomes the active copy, and the former active copy the replica.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`], [`Error::InvalidOption`] for a node there is not,
    /// [`Error::NotAMember`] or [`Error::NodeDown`].
    pub fn move_vbucket(&self, vbid: Vbid, node: usize) -> Result<(), Error> {
        if vbid.0 >= self.num_vbuckets() {
            return Err(self.no_vbucket(vbid));
        }
        self.cluster.move_vbucket(vbid, node)
    }

    /// Takes a node out of the cluster; replicas of what it had become active.
    ///
    /// A hard failover (`graceful` is `false`) treats the node as dead: its connections are closed
    /// and it refuses new ones. Each promoted replica goes on with what it received
    /// ([`set_replica_lag`](Self::set_replica_lag)); its history gets a new branch at the end of
    /// the last snapshot it received and persisted completely, or at the start of the one it did
    /// not ([`hold_persistence`](Self::hold_persistence)). Without a replica the vBucket is lost
    /// until the next rebalance, which makes it anew.
    ///
    /// A graceful one gives each replica everything first: histories go on, the node stays
    /// reachable, its streams end with "state changed".
    ///
    /// The node comes back with [`restart`](Self::restart) and [`rebalance`](Self::rebalance).
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node there is not, [`Error::NotAMember`],
    /// [`Error::LastNode`], or [`Error::NodeDown`] if a node that does not run is to leave
    /// gracefully.
    pub fn failover(&self, node: usize, graceful: bool) -> Result<(), Error> {
        self.cluster.fail_over(node, graceful)
    }

    /// Takes nodes out of the cluster that had most of its votes, as an operator does who accepts
    /// that this is unsafe. As hard failovers of each; and the versions of the cluster map begin a
    /// new epoch: its epoch rises, its revision starts over.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node there is not, [`Error::NotAMember`], or
    /// [`Error::LastNode`] if none would be left.
    pub fn failover_unsafely(&self, nodes: &[usize]) -> Result<(), Error> {
        self.cluster.fail_over_unsafely(nodes)
    }

    /// Version of the cluster map: its epoch and its revision. Every change makes a greater pair.
    #[must_use]
    pub fn map_version(&self) -> (i64, i64) {
        let version = self.cluster.map().version;
        (version.epoch, version.rev)
    }

    /// Stops a node at once, as a crash does: connections are closed, new ones refused, what was
    /// not persisted is lost. The cluster map stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node there is not.
    pub fn kill(&self, node: usize) -> Result<(), Error> {
        self.cluster.kill(node)
    }

    /// Stops a node, unless it is stopped already, and starts it again.
    ///
    /// A clean restart persists everything first; histories go on. After an unclean one, and
    /// always after [`kill`](Self::kill), the node has what was persisted: seqnos above that are
    /// given again, and active vBuckets begin a new history branch there. Replicas elsewhere go
    /// back with them. An ephemeral bucket loses everything either way.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a node there is not, or [`Error::NodeDown`] if its ports
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
        tokio::time::timeout(PORT_PATIENCE, turn).await.map_err(|_| Error::NodeDown { node })
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

    /// Spreads the vBuckets and their replicas evenly over the nodes that run, those that were
    /// failed over and restarted included; one vBucket after the other, each with a cluster map.
    /// Histories go on; streams of vBuckets that move end with "state changed".
    ///
    /// # Errors
    /// [`Error::NodeDown`] if a node of the cluster does not run.
    pub fn rebalance(&self) -> Result<(), Error> {
        self.cluster.rebalance()
    }

    /// Sets how many changes a replica of a vBucket leaves unapplied, `None` for all that come:
    /// they are lost if the active copy's node fails. Replicas are numbered from 1, in the order
    /// of the cluster map. Default 0.
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
        self.cluster.set_replica_lag(vbid, replica, lag).ok_or(unknown)
    }

    /// Keeps one copy of a vBucket from persisting, or lets it persist again: copy 0 is the active
    /// one, 1 the first replica.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::UnknownReplica`].
    pub fn hold_persistence(&self, vbid: Vbid, copy: usize, hold: bool) -> Result<(), Error> {
        let set = |copies: &mut Copies| {
            let vbucket = &mut copies.get_mut(copy)?.vbucket;
            vbucket.hold_persistence(hold);
            Some(())
        };
        let known = self.cluster.bucket.rearrange(vbid, set);
        let known = known.ok_or_else(|| self.no_vbucket(vbid))?;
        known.ok_or(Error::UnknownReplica { vbid, replica: copy })
    }

    /// Expires every document whose time has passed; returns how many. Otherwise that happens
    /// when one is next accessed.
    pub fn expire_due(&self) -> usize {
        let bucket = &self.cluster.bucket;
        let expire = |vbid| bucket.with(vbid, |vbucket| vbucket.expire_due(self.now()));
        bucket.vbids().filter_map(expire).sum()
    }

    /// Persists everything and lets it leave memory: a stream that starts from 0 is then read
    /// from disk. Otherwise changes are persisted after a short while, and recent ones are kept in
    /// memory as well.
    pub fn persist(&self) {
        let bucket = &self.cluster.bucket;
        for vbid in bucket.vbids() {
            bucket.each_copy(vbid, |vbucket| {
                vbucket.persist_and_evict();
                true
            });
            bucket.changes().announce(vbid);
        }
        if let Some(store) = &self.store
            && let Err(error) = store.round(&self.cluster, bucket.vbids())
        {
            tracing::error!(%error, "changes could not be written to the data folder");
        }
    }

    /// Persists everything, then forgets the tombstones of a vBucket up to seqno `to`; its last
    /// change is kept whatever it is.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`].
    pub fn purge(&self, vbid: Vbid, to: Seqno) -> Result<(), Error> {
        self.purge_copies(vbid, |vbucket| vbucket.purge(to))
    }

    /// As [`purge`](Self::purge), on disk only: recent changes stay in memory, tombstones too. Tests
    /// replay recordings of servers with it.
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
        let purged = self.cluster.bucket.each_copy(vbid, purge);
        purged.then_some(()).ok_or_else(|| self.no_vbucket(vbid))
    }

    /// Takes a vBucket back to how it was at seqno `to`, as a failover to a replica that had
    /// received no more: changes above it are gone, a new history branch begins there, and streams
    /// of the vBucket end with "state changed".
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`], [`Error::RollbackBeyondHighSeqno`], or
    /// [`Error::RollbackHistoryGone`] if overwritten documents that are needed are no longer kept.
    pub fn roll_back(&self, vbid: Vbid, to: Seqno) -> Result<(), Error> {
        self.cluster.bucket.roll_back(vbid, to).ok_or_else(|| self.no_vbucket(vbid))??;
        self.cluster.bring_forward();
        Ok(())
    }

    /// Changes the state of the active copy of a vBucket, as a cluster manager does in mid-move:
    /// its streams end with "state changed", and it takes writes only while it is active. Making
    /// it active again is also the way back after a client took it over. A replica that becomes
    /// active begins a new history branch, where it has persisted all of its history.
    ///
    /// # Errors
    /// [`Error::UnknownVbucket`] or [`Error::VbucketUnavailable`].
    pub fn set_vbucket_state(&self, vbid: Vbid, state: VBucketState) -> Result<(), Error> {
        let vbuuid = self.cluster.bucket.chance().vbuuid();
        // Servers before 7.0 go on with the checkpoint they had as a replica.
        let keeps_checkpoint = self.cluster.dcp_config().server_version.is_legacy();
        let set = |copies: &mut Copies| copies.set_state(state, vbuuid, keeps_checkpoint);
        let set = self.cluster.bucket.rearrange(vbid, set);
        if set == Some(true) { Ok(()) } else { Err(self.no_vbucket(vbid)) }
    }

    /// Takes a privilege from the user, from now on: requests that need it are refused, streams
    /// that need it end with "lost privileges" in the place of their next snapshot.
    pub fn revoke(&self, privilege: Privilege) {
        self.cluster.change_privileges(|revoked| revoked.push(privilege));
    }

    /// Gives a privilege back.
    pub fn grant(&self, privilege: Privilege) {
        self.cluster.change_privileges(|revoked| revoked.retain(|&other| other != privilege));
    }

    /// Drops the bucket: connections to it are closed without another word, and clients that ask
    /// for it are told that there is none.
    ///
    /// # Errors
    /// [`Error::NoBucket`].
    pub fn drop_bucket(&self) -> Result<(), Error> {
        self.cluster.drop_bucket()
    }

    /// Creates the bucket again, empty and with another identity.
    ///
    /// # Errors
    /// [`Error::BucketExists`].
    pub fn create_bucket(&self) -> Result<(), Error> {
        self.cluster.create_bucket()
    }

    /// Removes every document of the bucket at once, as a flush does: its vBuckets begin anew with
    /// other histories, their streams end with "state changed". Scopes and collections stay.
    ///
    /// # Errors
    /// [`Error::NoBucket`].
    pub fn flush_bucket(&self) -> Result<(), Error> {
        self.cluster.flush_bucket()
    }

    /// Creates a scope; `_system` too, which servers since 7.6 have from the start.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it exists or may not be called that; [`Error::NoBucket`].
    pub fn create_scope(&self, scope: &str) -> Result<ScopeId, Error> {
        self.cluster.update_manifest(self.now(), |manifest| manifest.create_scope(scope))
    }

    /// Creates a collection. With `max_ttl` its documents live that many seconds at most.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it exists, may not be called that, or there is no such scope;
    /// [`Error::NoBucket`].
    pub fn create_collection(
        &self,
        scope: &str,
        collection: &str,
        max_ttl: Option<u32>,
    ) -> Result<CollectionId, Error> {
        self.cluster.update_manifest(self.now(), |manifest| {
            let settings = CollectionSettings { max_ttl, history: false };
            manifest.create_collection(scope, collection, settings)
        })
    }

    /// Changes how many seconds the documents of a collection live at most, `None` for as long as
    /// they say, and whether the collection is marked to keep every version of its documents.
    /// Documents written before keep their expiry.
    ///
    /// Clients are told by an event of its own, those with FlatBuffers events only; the others see
    /// nothing but its seqno. Nothing happens if that is how the collection is already.
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
        self.cluster.update_manifest(self.now(), |manifest| {
            let settings = CollectionSettings { max_ttl, history };
            manifest.modify_collection(scope, collection, settings)
        })
    }

    /// Empties a collection at once: its documents are gone without a tombstone, and clients are
    /// told that it begins anew, with the same id.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is no such collection; [`Error::NoBucket`].
    pub fn flush_collection(&self, scope: &str, collection: &str) -> Result<(), Error> {
        self.cluster
            .update_manifest(self.now(), |manifest| manifest.flush_collection(scope, collection))
    }

    /// Drops a scope with everything in it.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is none, or it is the default scope; [`Error::NoBucket`].
    pub fn drop_scope(&self, scope: &str) -> Result<(), Error> {
        self.cluster.update_manifest(self.now(), |manifest| manifest.drop_scope(scope))
    }

    /// Drops a collection with everything in it; the default collection never comes back.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is none; [`Error::NoBucket`].
    pub fn drop_collection(&self, scope: &str, collection: &str) -> Result<(), Error> {
        self.cluster
            .update_manifest(self.now(), |manifest| manifest.drop_collection(scope, collection))
    }

    /// The id of a collection.
    ///
    /// # Errors
    /// [`Error::UnknownCollection`].
    pub fn collection_id(&self, scope: &str, collection: &str) -> Result<CollectionId, Error> {
        let manifest = self.cluster.manifest();
        let found = manifest
            .scope_named(scope.as_bytes())
            .and_then(|scope| scope.collection_named(collection.as_bytes()));
        found.map(|collection| collection.id).ok_or_else(|| Error::UnknownCollection {
            scope: scope.to_owned(),
            collection: collection.to_owned(),
        })
    }

    /// Makes the collections manifest the one that a data folder would keep as `stored`, with the
    /// ids in it. Tests replay recordings of servers with it.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it is none; [`Error::NoBucket`].
    #[doc(hidden)]
    pub fn set_manifest(&self, stored: &str) -> Result<(), Error> {
        let stored = serde_json::from_str(stored).unwrap_or_default();
        let set = Manifest::from_stored(&stored).ok_or(Error::Manifest("it is not a manifest"))?;
        self.cluster.update_manifest(self.now(), |manifest| {
            *manifest = set;
            Ok(())
        })
    }

    /// The collections manifest as clients get it, in JSON.
    #[must_use]
    pub fn manifest_json(&self) -> String {
        self.cluster.manifest().to_json()
    }
}
