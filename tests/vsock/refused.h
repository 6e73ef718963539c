/*
 * Included before vsock_test.c, whose two sends that must fail become calls of this; see images/vsock-test.
 *
 * The test says SHUTRDDONE on its control connection after shutdown(SHUT_RD), and expects that the other side cannot
 * send from then on. Here that line and the shutdown travel through the device on two connections, and nothing orders
 * connections: a byte that is sent before the shutdown arrives is right to succeed. Linux's own test sends again since
 * 2025, for up to ten seconds and for the same reason.
 */
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#define REFUSED_TRIES 1000

static inline ssize_t send_until_refused(int fd, const void *buffer, size_t length, int flags)
{
	ssize_t result = 0;

	for (int i = 0; i < REFUSED_TRIES; i++) {
		result = send(fd, buffer, length, flags);
		if (result < 0)
			break;
		usleep(10000);
	}
	return result;
}
