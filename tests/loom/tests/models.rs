//! Runs the models, and prints how many interleavings each has.

use dcp_loom::models;

macro_rules! models {
    ($($name:ident = $model:expr;)*) => {
        $(#[test]
        fn $name() {
            let interleavings = $model;
            println!("{}: {interleavings} interleavings", stringify!($name));
            assert!(interleavings > 5, "{interleavings} interleavings: the threads do not meet");
        })*
    };
}

models! {
    batches_arrive_in_order_within_the_window =
        models::batches_arrive_in_order_within_the_window(3, 2);
    a_driver_without_room_is_woken = models::batches_arrive_in_order_within_the_window(2, 1);
    the_last_batch_taken_wakes_the_driver = models::the_last_batch_taken_wakes_the_driver(2);
    two_drivers_and_a_reader_that_gave_up_once =
        models::two_drivers_and_a_reader_that_gave_up_once(1);
    the_newest_cluster_map_is_taken = models::the_newest_cluster_map_is_taken(3);
    acknowledgements_from_two_threads = models::acknowledgements_from_two_threads();
    an_acknowledgement_while_the_stream_goes_on =
        models::an_acknowledgement_while_the_stream_goes_on();
}
