package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/couchbase/gocb/v2"
)

var documents = []call{
	{"`Get`, `Upsert`, `Insert`, `Replace`, `Remove`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		t.same(t.stored(t.key), 1)
		_, err = t.collection().Insert(t.key, number{}, nil)
		t.is(err, gocb.ErrDocumentExists)
		first, err := t.collection().Replace(t.key, number{2}, nil)
		t.ok(err)
		second, err := t.collection().Replace(t.key, number{3}, &gocb.ReplaceOptions{Cas: first.Cas()})
		t.ok(err)
		_, err = t.collection().Replace(t.key, number{4}, &gocb.ReplaceOptions{Cas: first.Cas()})
		t.is(err, gocb.ErrCasMismatch)
		_, err = t.collection().Remove(t.key, &gocb.RemoveOptions{Cas: second.Cas()})
		t.ok(err)
		_, err = t.collection().Get(t.key, nil)
		t.is(err, gocb.ErrDocumentNotFound)
		return ""
	}},
	{"`Exists`", func(t *trial) string {
		t.same(t.exists(t.key), false)
		_, err := t.collection().Insert(t.key, number{}, nil)
		t.ok(err)
		t.same(t.exists(t.key), true)
		return ""
	}},
	{"`Get` with a projection, with the expiry, `PreserveExpiry`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, &gocb.UpsertOptions{Expiry: time.Hour})
		t.ok(err)
		_, err = t.collection().Upsert(t.key, number{2}, &gocb.UpsertOptions{PreserveExpiry: true})
		t.ok(err)
		found, err := t.collection().Get(t.key, &gocb.GetOptions{
			WithExpiry: true, Project: []string{"n"}})
		t.ok(err)
		var value number
		t.ok(found.Content(&value))
		t.same(value.N, 2)
		t.same(time.Until(found.ExpiryTime()).Round(time.Hour), time.Hour)
		return ""
	}},
	{"`Touch`, `GetAndTouch`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		_, err = t.collection().Touch(t.key, time.Hour, nil)
		t.ok(err)
		_, err = t.collection().GetAndTouch(t.key, 2*time.Hour, nil)
		t.ok(err)
		found, err := t.collection().Get(t.key, &gocb.GetOptions{WithExpiry: true})
		t.ok(err)
		t.same(time.Until(found.ExpiryTime()).Round(time.Hour), 2*time.Hour)
		return ""
	}},
	{"`GetAndLock`, `Unlock`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, nil)
		t.ok(err)
		locked, err := t.collection().GetAndLock(t.key, 15*time.Second, nil)
		t.ok(err)
		_, err = t.collection().Upsert(t.key, number{2}, &gocb.UpsertOptions{
			Timeout: 100 * time.Millisecond})
		t.is(err, gocb.ErrTimeout, gocb.ErrDocumentLocked)
		t.is(t.collection().Unlock(t.key, locked.Cas()+1, nil), gocb.ErrCasMismatch)
		t.ok(t.collection().Unlock(t.key, locked.Cas(), nil))
		t.is(t.collection().Unlock(t.key, locked.Cas(), nil), gocb.ErrDocumentNotLocked)
		locked, err = t.collection().GetAndLock(t.key, 15*time.Second, nil)
		t.ok(err)
		_, err = t.collection().Replace(t.key, number{3}, &gocb.ReplaceOptions{Cas: locked.Cas()})
		t.ok(err)
		t.same(t.stored(t.key), 3)
		return ""
	}},
	{"`Do`", func(t *trial) string {
		var writes, reads []gocb.BulkOp
		for n := range 50 {
			key := fmt.Sprintf("%s-%d", t.key, n)
			writes = append(writes, &gocb.InsertOp{ID: key, Value: number{n}})
			reads = append(reads, &gocb.GetOp{ID: key})
		}
		t.ok(t.collection().Do(writes, nil))
		t.ok(t.collection().Do(reads, nil))
		for n := range 50 {
			write, read := writes[n].(*gocb.InsertOp), reads[n].(*gocb.GetOp)
			t.ok(write.Err)
			t.ok(read.Err)
			var value number
			t.ok(read.Result.Content(&value))
			t.same(value.N, n)
		}
		return ""
	}},
	{"transcoders for text and bytes", func(t *trial) string {
		text := gocb.NewRawStringTranscoder()
		_, err := t.collection().Upsert(t.key, "ü", &gocb.UpsertOptions{Transcoder: text})
		t.ok(err)
		found, err := t.collection().Get(t.key, &gocb.GetOptions{Transcoder: text})
		t.ok(err)
		var value string
		t.ok(found.Content(&value))
		t.same(value, "ü")
		return ""
	}},
	{"`Binary()`", func(t *trial) string {
		counted, err := t.collection().Binary().Increment(t.key, &gocb.IncrementOptions{Initial: 10, Delta: 1})
		t.ok(err)
		t.same(counted.Content(), 10)
		counted, err = t.collection().Binary().Increment(t.key, &gocb.IncrementOptions{Delta: 5})
		t.ok(err)
		t.same(counted.Content(), 15)
		counted, err = t.collection().Binary().Decrement(t.key, &gocb.DecrementOptions{Delta: 7})
		t.ok(err)
		t.same(counted.Content(), 8)
		_, err = t.collection().Binary().Append(t.key, []byte("0"), nil)
		t.ok(err)
		_, err = t.collection().Binary().Prepend(t.key, []byte("2"), nil)
		t.ok(err)
		found, err := t.collection().Get(t.key, nil)
		t.ok(err)
		var value int
		t.ok(found.Content(&value))
		t.same(value, 280)
		return ""
	}},
	{"`LookupIn`, `MutateIn`", func(t *trial) string {
		insert := gocb.StoreSemanticsInsert
		made, err := t.collection().MutateIn(t.key, []gocb.MutateInSpec{
			gocb.UpsertSpec("a.b", []int{1, 2}, &gocb.UpsertSpecOptions{CreatePath: true}),
			gocb.UpsertSpec("_meta.by", "me", &gocb.UpsertSpecOptions{CreatePath: true, IsXattr: true}),
			gocb.UpsertSpec("_meta.cas", gocb.MutationMacroCAS, &gocb.UpsertSpecOptions{IsXattr: true}),
		}, &gocb.MutateInOptions{StoreSemantic: insert})
		t.ok(err)
		_, err = t.collection().MutateIn(t.key, []gocb.MutateInSpec{
			gocb.ArrayAppendSpec("a.b", 3, nil), gocb.ArrayPrependSpec("a.b", 0, nil),
			gocb.ArrayAddUniqueSpec("a.b", 4, nil), gocb.IncrementSpec("n", 7, nil),
		}, &gocb.MutateInOptions{Cas: made.Cas()})
		t.ok(err)
		_, err = t.collection().MutateIn(t.key, []gocb.MutateInSpec{
			gocb.RemoveSpec("n", nil), gocb.InsertSpec("a", 1, nil),
		}, nil)
		t.is(err, gocb.ErrPathExists)
		found, err := t.collection().LookupIn(t.key, []gocb.LookupInSpec{
			gocb.GetSpec("a.b", nil), gocb.GetSpec("n", nil), gocb.ExistsSpec("z", nil),
			gocb.GetSpec("_meta.by", &gocb.GetSpecOptions{IsXattr: true}), gocb.GetSpec("z", nil),
			gocb.CountSpec("a.b", nil),
		}, nil)
		t.ok(err)
		part := func(index uint) any {
			var value any
			t.ok(found.ContentAt(index, &value))
			return value
		}
		t.same([]any{part(0), part(1), part(2), part(3), part(5)},
			[]any{[]int{0, 1, 2, 3, 4}, 7, false, "me", 5})
		t.is(found.ContentAt(4, new(any)), gocb.ErrPathNotFound)
		return ""
	}},
	{"`List`, `Map`, `Set`, `Queue`", func(t *trial) string {
		list := t.collection().List(t.key + "-list")
		t.ok(list.Append("b"))
		t.ok(list.Prepend("a"))
		size, err := list.Size()
		t.ok(err)
		t.same(size, 2)
		names := t.collection().Map(t.key + "-map")
		t.ok(names.Add("a", 1))
		known, err := names.Exists("b")
		t.ok(err)
		t.same(known, false)
		t.ok(t.collection().Set(t.key + "-set").Add("a"))
		queue := t.collection().Queue(t.key + "-queue")
		t.ok(queue.Push("a"))
		t.ok(queue.Push("b"))
		var first string
		t.ok(queue.Pop(&first))
		t.same(first, "a")
		return ""
	}},
	{"`GetAnyReplica`, `GetAllReplicas`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, &gocb.UpsertOptions{
			DurabilityLevel: gocb.DurabilityLevelMajority})
		t.ok(err)
		_, err = t.collection().GetAnyReplica(t.key, nil)
		t.ok(err)
		t.same(t.copies(t.key), map[bool]string{false: `{"n":1}`, true: `{"n":1}`})
		return ""
	}},
	{"`LookupInAnyReplica`, `LookupInAllReplicas`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, &gocb.UpsertOptions{
			DurabilityLevel: gocb.DurabilityLevelMajority})
		t.ok(err)
		paths := []gocb.LookupInSpec{gocb.GetSpec("n", nil)}
		_, err = t.collection().LookupInAnyReplica(t.key, paths, nil)
		t.ok(err)
		found, err := t.collection().LookupInAllReplicas(t.key, paths, nil)
		t.ok(err)
		copies := map[bool]int{}
		for each := found.Next(); each != nil; each = found.Next() {
			var n int
			t.ok(each.ContentAt(0, &n))
			copies[each.IsReplica()] = n
		}
		t.same(copies, map[bool]int{false: 1, true: 1})
		return ""
	}},
	{"`DurabilityLevelMajority`", durably(gocb.DurabilityLevelMajority)},
	{"`DurabilityLevelMajorityAndPersistOnMaster`", durably(gocb.DurabilityLevelMajorityAndPersistOnMaster)},
	{"`DurabilityLevelPersistToMajority`", durably(gocb.DurabilityLevelPersistToMajority)},
	{"`PersistTo`, `ReplicateTo`", func(t *trial) string {
		_, err := t.collection().Upsert(t.key, number{1}, &gocb.UpsertOptions{PersistTo: 1, ReplicateTo: 1})
		t.ok(err)
		t.same(t.copies(t.key)[true], `{"n":1}`)
		return ""
	}},
}

// copies is what the active copy and the replica have under a key.
func (t *trial) copies(key string) map[bool]string {
	found, err := t.collection().GetAllReplicas(key, nil)
	t.ok(err)
	copies := map[bool]string{}
	for each := found.Next(); each != nil; each = found.Next() {
		var value json.RawMessage
		t.ok(each.Content(&value))
		copies[each.IsReplica()] = string(value)
	}
	return copies
}

// durably makes every kind of write; each is on the replica when it returns.
func durably(level gocb.DurabilityLevel) func(*trial) string {
	return func(t *trial) string {
		replica := func(key, wanted string) { t.same(t.copies(key)[true], wanted) }
		documents, counters, count := t.collection(), t.collection().Binary(), t.key+"-number"
		_, err := documents.Insert(t.key, number{1}, &gocb.InsertOptions{DurabilityLevel: level})
		t.ok(err)
		replica(t.key, `{"n":1}`)
		_, err = documents.Replace(t.key, number{2}, &gocb.ReplaceOptions{DurabilityLevel: level})
		t.ok(err)
		replica(t.key, `{"n":2}`)
		_, err = documents.Upsert(t.key, number{3}, &gocb.UpsertOptions{DurabilityLevel: level})
		t.ok(err)
		replica(t.key, `{"n":3}`)
		_, err = documents.MutateIn(t.key, []gocb.MutateInSpec{gocb.UpsertSpec("n", 4, nil)},
			&gocb.MutateInOptions{DurabilityLevel: level})
		t.ok(err)
		replica(t.key, `{"n":4}`)
		_, err = documents.Remove(t.key, &gocb.RemoveOptions{DurabilityLevel: level})
		t.ok(err)
		// The SDK waits for all copies until the time-out.
		_, err = documents.GetAnyReplica(t.key, &gocb.GetAnyReplicaOptions{Timeout: 200 * time.Millisecond})
		t.is(err, gocb.ErrDocumentUnretrievable)
		for range 2 {
			_, err = counters.Increment(count, &gocb.IncrementOptions{
				Initial: 1, Delta: 1, DurabilityLevel: level})
			t.ok(err)
		}
		replica(count, "2")
		_, err = counters.Decrement(count, &gocb.DecrementOptions{Delta: 1, DurabilityLevel: level})
		t.ok(err)
		_, err = counters.Append(count, []byte("0"), &gocb.AppendOptions{DurabilityLevel: level})
		t.ok(err)
		_, err = counters.Prepend(count, []byte("2"), &gocb.PrependOptions{DurabilityLevel: level})
		t.ok(err)
		replica(count, "210")
		return ""
	}
}

// impossible is a durable write with too few nodes, on a cluster of its own.
var impossible = call{"a durability level with too few nodes: `ErrDurabilityImpossible`", func(t *trial) string {
	for _, level := range []gocb.DurabilityLevel{
		gocb.DurabilityLevelMajority, gocb.DurabilityLevelMajorityAndPersistOnMaster,
		gocb.DurabilityLevelPersistToMajority,
	} {
		_, err := t.collection().Upsert(t.key, number{1}, &gocb.UpsertOptions{DurabilityLevel: level})
		t.is(err, gocb.ErrDurabilityImpossible)
	}
	t.same(t.exists(t.key), false)
	return ""
}}
